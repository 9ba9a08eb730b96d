"""The ``trainer:`` section: how a model learns, and what reinforcement learning adds to it."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from areal_lite.api.schema import STRICT

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Atleast0 = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


def _refuse(complaints: dict[str, bool]) -> None:
    if told := [complaint for complaint, holds in complaints.items() if holds]:
        raise ValueError("; ".join(told))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoRAConfig:
    """Low-rank adapters: the model's own weights stay as they are."""

    rank: Positive = 16
    """Rank of the adapters."""

    alpha: Above0 = 32.0
    """Adapters are scaled by alpha / rank."""

    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get one; all-linear is every linear layer but the output embedding."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW, and the shape of its learning rate."""

    learning_rate: Above0
    """Peak learning rate of AdamW. No default: it decides what a run learns."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, down to 0 at the last step."""

    warmup_steps: Count = 0
    """Steps of linear rise from 0."""

    weight_decay: Atleast0 = 0.0
    """AdamW's decoupled weight decay; norms and biases have none."""

    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's decay rates."""

    adam_eps: Above0 = 1e-8
    """AdamW's denominator floor."""

    max_grad_norm: Above0 = 1.0
    """Gradients are scaled down to this global norm."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LearnerConfig(OptimizerConfig):
    """What every kind of training has."""

    max_tokens_per_microbatch: Positive = 4096
    """Tokens, padding included, in one forward pass of one rank; halved once where memory runs out."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Autocast number format; weights and optimizer stay float32."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model trains; auto takes a GPU if there is one."""

    num_threads: Count = 0
    """CPU threads of the trainer; 0 shares the cores with an embedded server."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""

    deterministic: bool = False
    """Refuse operations that are not bit for bit the same in every run; slower on a GPU."""

    lora: LoRAConfig | None = None
    """Train adapters only; null trains all weights."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KLConfig:
    """A penalty for leaving the frozen starting model."""

    coef: Above0
    """Its weight."""

    place: Literal["loss", "reward"] = "loss"
    """Part of the loss, or taken from the reward of each token."""

    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of KL(policy || reference) from one sample; with + its gradient is that of k2."""

    unbiased: bool = False
    """In the loss: weigh each token by policy / behaviour, so that value and gradient of k1 and k3 are those of the KL
    whichever policy sampled it (DeepSeek-V3.2)."""

    target: Above0 | None = None
    """In the reward: the KL (nats per token) that coef is adapted to; null keeps it fixed."""

    horizon: Above0 = 10000.0
    """Sequences over which coef adapts to target."""

    def __post_init__(self) -> None:
        rewards = self.place == "reward"
        _refuse(
            {
                f"target is {self.target}, and only a penalty in the reward adapts: set place: reward, or remove it": (
                    self.target is not None and not rewards
                ),
                f"horizon is {self.horizon}, and without a target nothing adapts: set target, or remove it": (
                    self.target is None and self.horizon != KLConfig.horizon
                ),
                f"estimator is {self.estimator}, whose + is about the gradient, and a reward has none: remove the +": (
                    rewards and self.estimator.endswith("+")
                ),
                f"unbiased is set with place {self.place} and estimator {self.estimator}: it is for the loss, with k1 "
                "or k3": self.unbiased and (rewards or self.estimator not in ("k1", "k3")),
            }
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CorrectionConfig:
    """What is done about tokens that the proximal policy did not sample: stale ones, and the engine's rounding."""

    level: Literal["token", "sequence", "none"] = "token"
    """What proximal / behaviour weighs: each token by its own ratio, or by that of its whole sequence; none
    weighs nothing."""

    max_weight: Above0 = 5.0
    """Larger weights are cut to it (truncated importance sampling)."""

    outside: Literal["truncate", "mask"] = "truncate"
    """mask trains nothing where the ratio is above max_weight or below min_weight (IcePop)."""

    min_weight: Atleast0 = 0.0
    """Least ratio that trains where outside is mask."""

    normalize: bool = False
    """Scale the weights of a step to mean 1, where outside is truncate."""

    reject: str | None = None
    """Statistics that reject, joined by commas: token_k1, seq_sum_k1, seq_mean_k3, seq_max_k2, ...; null rejects
    nothing."""

    reject_bounds: str | None = None
    """A bound for each, joined by commas; lower_upper on the ratio for k1, an upper one for the others."""

    max_row_kl: Above0 | None = None
    """Nats per token by which the policy may have left an answer and still be pushed further from it: worse ones with
    a larger mean of behaviour - policy train nothing (off-policy sequence masking); null sets no bound."""

    def __post_init__(self) -> None:
        masks = self.outside == "mask"
        _refuse(
            {
                f"outside is mask and level {self.level}: single tokens are masked; set level: token": (
                    masks and self.level != "token"
                ),
                f"normalize is set with {'outside: mask' if masks else 'level: none'} and does nothing: remove one": (
                    self.normalize and (masks or self.level == "none")
                ),
                f"max_weight is {self.max_weight} with level: none, which weighs nothing: remove one": (
                    self.level == "none" and self.max_weight != CorrectionConfig.max_weight
                ),
                f"min_weight is {self.min_weight}, not below max_weight {self.max_weight}: nothing would be trained": (
                    masks and self.min_weight >= self.max_weight
                ),
                f"min_weight is {self.min_weight}, and only outside: mask looks at it: set that, or remove it": (
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
    """A model of the value of each token, for advantage estimators that need one."""

    model_path: str | None = None
    """Folder of a Hugging Face model; null: the policy's. Its value head begins at 0."""

    clip_eps: Above0 = 0.5
    """A value moves at most so far from what it was at the start of the step."""

    updates_before_policy: Count = 0
    """Steps that train the critic alone before the policy's first update."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainerConfig(LearnerConfig):
    """How weights are learned from a batch of groups."""

    total_steps: Positive
    """Training steps. No default: it decides what the learning-rate schedule means."""

    minibatches_per_step: Positive = 1
    """Optimizer updates per batch; each takes an equal share of its rollout.consumer_batch_size groups."""

    advantage: str = "grpo"
    """Advantage estimator: gae, grpo, dr_grpo, grpo_passk, rloo, reinforce, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, opo, gpg, optimal_token_baseline, or the dotted path of your own."""

    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    """Its options, such as gamma and lam of gae."""

    advantage_mean: Literal["none", "group", "batch"] = "none"
    """Afterwards subtract the mean over the tokens of the group or batch."""

    advantage_std: Literal["none", "group", "batch"] = "none"
    """Afterwards divide by the standard deviation over the tokens of the group or batch."""

    loss: str = "ppo"
    """Policy loss: ppo, gspo, sapo, cispo, gpg, gmpo, clip_cov, kl_cov, m2po, reinforce, or the dotted path of your
    own."""

    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Its options, such as clip_eps, clip_eps_high and dual_clip of ppo."""

    loss_aggregation: AggregationMode | None = None
    """How token losses become one number; null: what the loss is defined with."""

    loss_scale: Positive | None = None
    """Divisor of seq-mean-token-sum-norm, in tokens; needed there, and only there."""

    proximal: Literal["trainer", "behaviour"] = "trainer"
    """Centre of the trust region: the weights a step begins with, as the trainer computes them, or the log-probs the
    engine sampled with."""

    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """For data that the proximal policy did not sample."""

    overlong_buffer: Count = 0
    """Tokens before gconfig.max_new_tokens over which the reward falls by up to 1; 0 leaves it alone."""

    kl: KLConfig | None = None
    """Penalty for leaving the starting model; null keeps no such model."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    critic: CriticConfig | None = None
    """A critic, for gae or an estimator of your own that asks for values; null trains without."""

    def __post_init__(self) -> None:
        scaled, of_ratio = self.loss_aggregation == "seq-mean-token-sum-norm", self.correction
        idle = [
            name
            for name in ("level", "max_weight", "outside", "normalize", "reject")
            if getattr(of_ratio, name) not in (getattr(CorrectionConfig, name), "none")
        ]
        ahead = 0 if self.critic is None else self.critic.updates_before_policy
        _refuse(
            {
                f"correction has {', '.join(idle)}, for a ratio that proximal: behaviour makes 1: remove one": (
                    self.proximal == "behaviour" and bool(idle)
                ),
                f"loss_aggregation {self.loss_aggregation} divides by loss_scale: give it, in tokens": (
                    scaled and self.loss_scale is None
                ),
                f"loss_scale is {self.loss_scale}, and only loss_aggregation: seq-mean-token-sum-norm divides by it: "
                "set that, or remove it": self.loss_scale is not None and not scaled,
                f"critic.updates_before_policy is {ahead} of {self.total_steps} total_steps: the policy would never be "
                "trained; set fewer": ahead >= self.total_steps,
            }
        )
