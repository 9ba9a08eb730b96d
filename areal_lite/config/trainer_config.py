"""The ``trainer:`` section: optimizer, algorithm and losses."""

from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple
from pydantic import Field
from pydantic.dataclasses import dataclass
from areal_lite.config.schema import STRICT, Above0, AtLeast0, Count, Fraction, LocalOrName, Positive, refuse

AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoRAConfig:
    """Low-rank adapters; the base model stays frozen."""

    rank: Positive = 16
    """Rank of the adapters."""
    alpha: Above0 = 32.0
    """Adapters are scaled by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers to adapt. all-linear is every linear layer except the output embedding."""


class AdapterShape(NamedTuple):
    """Size of a LoRA adapter, which servers must know before they start."""

    rank: int
    layers: tuple[str, ...]  # last parts of the adapted layers' names, such as ``q_proj``


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    learning_rate: Above0
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after warm-up; linear and cosine decay to 0 at the last step."""
    warmup_steps: Count = 0
    """Steps of linear warm-up from 0."""
    weight_decay: AtLeast0 = 0.0
    """Decoupled weight decay of AdamW; not applied to norms and biases."""
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Betas of AdamW."""
    adam_eps: Above0 = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: Above0 = 1.0
    """Clip gradients to this global norm."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LearnerConfig(OptimizerConfig):
    """Settings of every kind of training."""

    max_tokens_per_microbatch: Positive = 4096
    """Maximum tokens, padding included, per forward pass and rank. Halved once when out of memory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast dtype; weights and optimizer state are float32. auto is bfloat16, or float32 on a CPU that lacks it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Training device; auto uses a GPU if there is one."""
    sp_size: Positive = 1
    """Ranks that read the same sequences together, each some of their tokens, for sequences too long for one rank. Must
    divide the ranks and the model's attention heads."""
    tp_size: Positive = 1
    """Ranks that divide each layer among them, some heads and columns for each, for layers too large for one rank. Must
    divide the ranks, the model's attention heads, heads of keys and sizes of layers."""
    num_threads: Count = 0
    """CPU threads of the trainer; 0 takes all cores, divided among the trainers of a machine."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    deterministic: bool = False
    """Use deterministic operations for bit-equal reruns. Slower: the embedded server computes one request at a time.
    With dtype and server.dtype float32 on a CPU, server and trainer also compute the same bits: no mismatch."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters only, of a model that reads images on its language part. Null trains all weights."""
    vision: Literal["frozen", "train"] = "frozen"
    """Vision tower and connector of a model that reads images: as they are, or trained too."""

    def __post_init__(self) -> None:
        if self.vision == "train" and self.lora is not None:
            raise ValueError(
                "vision is train, but lora is set, whose adapters are on the language part alone: remove one"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherConfig:
    """Running servers of another model with the same tokenizer, which score the sampled tokens."""

    addresses: Annotated[list[str], Field(min_length=1)]
    """host:port of each server."""
    backend: Literal["sglang", "vllm", "embedded"] = "embedded"
    """Protocol of the servers."""
    tokenizer_path: LocalOrName | None = None
    """Folder or hub name of the teacher's tokenizer. Null: where the servers say that their model is."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KLConfig:
    """KL penalty against a reference: the frozen starting model, or a teacher (on-policy distillation)."""

    coef: Above0
    """Coefficient of the penalty."""
    teacher: TeacherConfig | None = None
    """The reference is this model instead of the starting model."""
    place: Literal["loss", "reward", "advantage"] = "loss"
    """Add the penalty to the loss, or subtract it from each token's reward or, after everything else, from its
    advantage: with a reward of 0 and k1 that is on-policy distillation."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Single-sample estimator of KL(policy || reference). k1+ and k3+ take their gradient from k2."""
    unbiased: bool = False
    """For k1 and k3 in the loss: weight tokens by policy / behaviour, which removes off-policy bias (DeepSeek-V3.2)."""
    target: Above0 | None = None
    """For a penalty in the reward: adapt coef to this KL (nats per token). Null keeps coef fixed."""
    horizon: Above0 = 10000.0
    """Number of episodes over which coef adapts to target."""

    def __post_init__(self) -> None:
        in_reward, in_loss = self.place == "reward", self.place == "loss"
        refuse(
            {
                f"target is {self.target}, but only a penalty in the reward adapts: set place: reward, or remove "
                "target": self.target is not None and not in_reward,
                f"horizon is {self.horizon}, but without target coef does not adapt: set target, or remove horizon": (
                    self.target is None and self.horizon != KLConfig.horizon
                ),
                f"estimator is {self.estimator}, but a {self.place} has no gradient: use {self.estimator[:-1]}": (
                    not in_loss and self.estimator.endswith("+")
                ),
                f"unbiased is set with place {self.place} and estimator {self.estimator}: it needs place: loss and "
                "estimator k1 or k3": self.unbiased and (not in_loss or self.estimator not in ("k1", "k3")),
            }
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CorrectionConfig:
    """Off-policy correction between the behaviour and proximal policies (staleness, engine rounding)."""

    level: Literal["token", "sequence", "none"] = "token"
    """Importance weight proximal / behaviour of each token, or of the whole episode (sequence); none disables it."""
    max_weight: Above0 = 5.0
    """Upper bound of the importance weights (truncated importance sampling)."""
    outside: Literal["truncate", "mask"] = "truncate"
    """For ratios beyond the bounds: truncate to max_weight, or mask the token (IcePop)."""
    min_weight: AtLeast0 = 0.0
    """Lower bound of the ratio; needs outside: mask."""
    normalize: bool = False
    """Scale the weights of a step to mean 1; needs outside: truncate."""
    reject: str | None = None
    """Rejection statistics, separated by commas: token_k1, seq_sum_k1, seq_mean_k3, seq_max_k2, ..."""
    reject_bounds: str | None = None
    """Bounds, separated by commas, one per statistic: lower_upper of the ratio for k1, an upper bound for others."""
    max_episode_kl: Above0 | None = None
    """Mask episodes with negative advantage whose mean behaviour - policy log-prob (nats per token) is above this
    bound (off-policy sequence masking)."""

    def __post_init__(self) -> None:
        masks = self.outside == "mask"
        refuse(
            {
                f"outside: mask works on tokens, but level is {self.level}: set level: token": (
                    masks and self.level != "token"
                ),
                f"normalize has no effect with {'outside: mask' if masks else 'level: none'}: remove one": (
                    self.normalize and (masks or self.level == "none")
                ),
                f"max_weight is {self.max_weight}, but level: none has no weights: remove one": (
                    self.level == "none" and self.max_weight != CorrectionConfig.max_weight
                ),
                f"min_weight {self.min_weight} is not below max_weight {self.max_weight}, so every token would be "
                "masked: lower min_weight": masks and self.min_weight >= self.max_weight,
                f"min_weight is {self.min_weight}, which needs outside: mask: set that, or remove min_weight": (
                    self.min_weight > 0 and not masks
                ),
                f"reject_bounds is {self.reject_bounds!r} without reject: name a statistic for each bound": (
                    self.reject is None and self.reject_bounds is not None
                ),
                f"reject is {self.reject!r} without reject_bounds: give a bound for each statistic": (
                    self.reject is not None and self.reject_bounds is None
                ),
            }
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CriticConfig(OptimizerConfig):
    """A critic that predicts the value of each token."""

    model_path: LocalOrName | None = None
    """Folder of a Hugging Face model. Null starts from the policy's model. The value head starts at 0."""
    clip_eps: Above0 = 0.5
    """Clip range of a value around its prediction at the start of the step."""
    updates_before_policy: Count = 0
    """Warm-up steps that train only the critic."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainerConfig(LearnerConfig):
    """Reinforcement learning from batches of groups."""

    total_steps: Positive | None = None
    """Training steps, which is also the length of the learning-rate schedule. Null: those of total_epochs."""
    total_epochs: Positive | None = None
    """Passes over the training rows, without an incomplete last batch. With total_steps, whichever ends first."""
    minibatches_per_step: Positive = 1
    """Optimizer updates per batch; each uses an equal share of the batch's groups."""
    advantage: str = "grpo"
    """Advantage estimator: gae, grpo, dr_grpo, grpo_passk, rloo, reinforce, reinforce_plus_plus, remax, opo, gpg,
    reinforce_plus_plus_baseline, optimal_token_baseline, turn_grpo, turn_returns, or a dotted path of yours."""
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the estimator, such as gamma and lam of gae."""
    advantage_mean: Literal["none", "group", "batch"] = "none"
    """Subtract the mean over the tokens of the group or batch from the estimator's advantages."""
    advantage_std: Literal["none", "group", "batch"] = "none"
    """Divide the advantages by their standard deviation over the tokens of the group or batch."""
    loss: str = "ppo"
    """Policy loss: ppo, gspo, sapo, cispo, gpg, gmpo, clip_cov, kl_cov, m2po, reinforce, or a dotted path of yours."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the loss, such as clip_eps, clip_eps_high and dual_clip of ppo."""
    loss_aggregation: AggregationMode | None = None
    """How token losses are reduced to a scalar. Null uses the default of the loss."""
    loss_scale: Positive | None = None
    """Divisor in tokens of seq-mean-token-sum-norm; required there and refused elsewhere."""
    proximal: Literal["trainer", "behaviour"] = "trainer"
    """Center of the trust region: log-probs that the trainer computes when the step begins, or those of sampling."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Off-policy correction."""
    overlong_buffer: Count = 0
    """Reduce an episode's reward linearly, by up to 1, over its last trained tokens before gconfig.max_new_tokens."""
    kl: KLConfig | None = None
    """KL penalty against the starting model or a teacher. Null loads no reference model."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    critic: CriticConfig | None = None
    """Critic for gae or a custom estimator that needs values. Null trains without one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scaled = self.loss_aggregation == "seq-mean-token-sum-norm"
        unused = [
            name
            for name in ("level", "max_weight", "outside", "normalize", "reject")
            if getattr(self.correction, name) not in (getattr(CorrectionConfig, name), "none")
        ]
        critic_only = 0 if self.critic is None else self.critic.updates_before_policy
        refuse(
            {
                "total_steps and total_epochs are null: give one of them": (
                    self.total_steps is None and self.total_epochs is None
                ),
                f"correction sets {', '.join(unused)}, but with proximal: behaviour the ratio is always 1: remove "
                "one": self.proximal == "behaviour" and bool(unused),
                f"loss_aggregation {self.loss_aggregation} divides by loss_scale: set it, in tokens": (
                    scaled and self.loss_scale is None
                ),
                f"loss_scale is {self.loss_scale}, but only loss_aggregation: seq-mean-token-sum-norm divides by it: "
                "set that, or remove loss_scale": self.loss_scale is not None and not scaled,
                f"critic.updates_before_policy is {critic_only} and total_steps {self.total_steps}: the policy would "
                "never be trained; set fewer": self.total_steps is not None and critic_only >= self.total_steps,
            }
        )

    @property
    def steps(self) -> int:
        """``total_steps``; a run has counted those of ``total_epochs`` before it asks."""
        if self.total_steps is None:
            raise ValueError("trainer.total_steps is null: give it, because only a run counts the steps of its epochs")
        return self.total_steps
