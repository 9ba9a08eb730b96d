"""One step of reinforcement learning, stage by stage: log-probs, values, rewards, advantages, updates.

Guarantees that loss and gradients do not depend on how the step is cut, that the same seed and batch give bit-equal
weights on one machine, and that a non-finite update is never applied. Knows nothing of servers or files."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
import numpy as np
import torch
from torch import Tensor
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.errors import ConfigError, TrainingError
from areal_lite.models.lora import adapters_off
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.parallel.sharding import is_empty, shard
from areal_lite.models.policy_model import load_policy, resolve_device, resolve_dtype
from areal_lite.models.truncation import Truncation
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.forward.scalar_model import ValueScorer, load_critic
from areal_lite.trainer.learner import Learner, OnSkip
from areal_lite.trainer.machine_metrics import peak_flops
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.policy_step import Batch, Step
from areal_lite.trainer.rl.step_tokens import StepCut, split_groups
from areal_lite.trainer.rl.token_facts import TokenFacts, token_facts
from areal_lite.trainer.rl.updates import CriticUpdate, PolicyUpdate
from areal_lite.trainer.seeding import seed_process

OnFacts = Callable[[TokenFacts], None]  # called with what each step computed for its tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSampling:
    """How the inference engine samples; the trainer's log-probs follow it."""

    temperature: float = 1.0
    truncation: Truncation | None = None  # truncated sampling, which the log-probs of the loss replay
    max_new_tokens: int | None = None  # length limit of an answer, for truncated answers and the overlong penalty


class PolicyTrainer:
    """Owns the policy being trained, and the frozen reference and the critic if the config has them.

    A step is :meth:`begin`, the stages in source order, then :meth:`finish`; :meth:`train_step` runs all of them.
    ``model_path`` is a folder of a Hugging Face causal LM, or a hub name; ``seed`` seeds python, numpy, torch and the
    order of minibatches. ``on_skip`` gets updates that were skipped, ``on_facts`` what each step computed."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model_path: str,
        seed: int,
        sampling: EngineSampling = EngineSampling(),
        on_skip: OnSkip | None = None,
        on_facts: OnFacts | None = None,
    ) -> None:
        self.config = config
        self.seed = seed
        self.algorithm = Algorithm(config, max_new_tokens=sampling.max_new_tokens)
        seed_process(seed, num_threads=config.num_threads, deterministic=config.deterministic)
        self.device = resolve_device(config.device)
        self._policy = self._load(model_path, sampling)
        self.model: Any = self._policy.model
        self._reference: TokenScorer | None = None
        if config.kl is not None and config.kl.teacher is None:
            # Under adapters the reference is the model without them.
            self._reference = self._policy
            if not config.lora:
                reference = self._load(model_path, sampling) if is_empty(self.model) else copy.deepcopy(self._policy)
                self._reference = shard(reference.requires_grad_(False))
        self.learner = Learner(self._policy, config, config, total_steps=config.steps, on_skip=on_skip)
        self.learners = {"policy": self.learner}
        self._policy_update = PolicyUpdate(self.learner, config, self.algorithm)
        self.critic: Learner | None = None
        self._critic_update: CriticUpdate | None = None
        if config.critic is not None:
            path = config.critic.model_path or model_path
            recompute = config.gradient_checkpointing
            critic = ValueScorer(load_critic(path, device=self.device, gradient_checkpointing=recompute))
            self.critic = Learner(critic, config, config.critic, total_steps=config.steps, on_skip=on_skip)
            self.learners["critic"] = self.critic
            self._critic_update = CriticUpdate(self.critic, config, self.algorithm)
        self.total_tokens = 0  # tokens of all batches so far, prompts included
        self._on_facts = on_facts

    def _load(self, model_path: str, sampling: EngineSampling) -> TokenScorer:
        config, device = self.config, self.device
        recompute = config.gradient_checkpointing
        model = load_policy(
            model_path, device=device, gradient_checkpointing=recompute, lora=config.lora, vision=config.vision
        )
        scorer = TokenScorer(model, temperature=sampling.temperature, truncation=sampling.truncation)
        exact = config.deterministic and resolve_dtype(config.dtype, device) == torch.float32
        if exact and Ranks.current().sp == 1:  # parts of a sequence have other rounding
            scorer.read_exactly()
        return scorer

    @property
    def steps_done(self) -> int:
        return self.learner.steps_done

    def train_step(self, batch: Batch, *, version: int) -> dict[str, float]:
        """Train on one batch of groups, in any order, and return its metrics.

        Sequences without a gradient (advantage 0 and neither KL nor entropy term, or no trained token) skip the forward
        pass but stay in every denominator; the metrics ``computed_tokens`` and ``trained_tokens`` show how many, and
        token statistics cover computed ones only. ``batch`` has groups as the engine returns them (only accepted ones
        train), or is a ``DataProto`` with the keys of :mod:`areal_lite.data.batch.training_batch`."""
        step = self.begin(batch, version=version)
        self.score_proximal(step)
        self.score_reference(step)
        self.score_values(step)
        self.penalize_kl(step)
        self.correct(step)
        self.estimate_advantages(step)
        self.update_critic(step)
        self.update_policy(step)
        return self.finish(step)

    def begin(self, batch: Batch, *, version: int) -> Step:
        """Check the batch, lay out its tokens and choose the minibatches; see :meth:`train_step`."""
        step = Step.of(batch, version=version, device=self.device)
        if multi_modal := sum(bool(sequence.multi_modal_inputs) for sequence in step.sequences):
            raise TrainingError(
                f"step {self.steps_done}: {multi_modal} of {len(step.sequences)} sequences have multi_modal_inputs, "
                "which are for own loops: this trainer reads images by their spans, TokenSequence.images"
            )
        step.minibatches = split_groups(
            step.sequences, self.config.minibatches_per_step, rng=np.random.default_rng([self.seed, self.steps_done])
        )
        if not step.minibatches:
            raise TrainingError(
                f"step {self.steps_done}: none of the {len(step.sequences)} sequences has a trained token: "
                "loss_mask must be True where the policy sampled"
            )
        step.metrics |= self.algorithm.shape_rewards(step.scores, step.tokens)
        return step

    def score_proximal(self, step: Step) -> None:
        """Fill in the log-probs at the start of the step, if needed before the update, whose first pass has them."""
        if self.config.proximal == "behaviour":
            if bool(step.tokens.behaviour.isnan().any()):
                raise ConfigError(
                    "trainer.proximal is 'behaviour', but the batch has tokens without recorded log-probs: "
                    "return 'logprobs' from the workflow, or set trainer.proximal: trainer"
                )
            step.tokens.proximal.copy_(step.tokens.behaviour)
            step.tokens.known.fill_(True)
        elif self.algorithm.needs_proximal_early:
            self._policy_update.score_proximal(step, step.all_indices)

    def score_reference(self, step: Step) -> None:
        """Fill in the log-probs of the frozen starting model; those of a teacher come with the batch."""
        if (reference := self._reference) is None:
            missing = sum(sequence.reference_logprobs is None for sequence in step.sequences)
            if self.config.kl is not None and missing:
                raise TrainingError(
                    f"step {self.steps_done}: {missing} of {len(step.sequences)} sequences have no reference_logprobs: "
                    "with trainer.kl.teacher every sequence needs those of the teacher (Teacher.score)"
                )
            return
        with adapters_off(self.model) if self.config.lora else nullcontext():
            self._policy_update.fill(
                step,
                "reference",
                step.all_indices,
                lambda part: {"reference": reference(part.packed, truncated=False).logprobs},
            )

    def score_values(self, step: Step) -> None:
        if self._critic_update is not None:
            self._critic_update.score(step)

    def penalize_kl(self, step: Step) -> None:
        """Subtract the KL penalty from the reward of each token, if ``trainer.kl`` places it there."""
        if self.algorithm.kl_place == "reward":
            step.check_finite("proximal", "reference")
            step.metrics |= self.algorithm.penalize(step.tokens, len(step.scores))

    def correct(self, step: Step) -> None:
        """Fill in off-policy correction weights; the update does it if log-probs are known only then."""
        if self.algorithm.needs_proximal_early:
            tokens, behaviour = step.tokens, step.tokens.behaviour_or_proximal()
            tokens.correction = self.algorithm.correction(tokens.proximal, behaviour, tokens.episodes)

    def estimate_advantages(self, step: Step) -> None:
        """Compute each token's advantage from rewards and, with a critic, values."""
        with step.clock("advantages"):
            step.check_finite("rewards", "values", "proximal", "reference", "sum_squared_probs", "correction")
            turns = step.turns() if "turns" in self.algorithm.needs else None
            self.algorithm.advantages(step.tokens, step.scores, step.baselines, step.group_ids, turns)

    def update_critic(self, step: Step) -> None:
        if self._critic_update is not None:
            self._critic_update.update(step)

    def update_policy(self, step: Step) -> None:
        self._policy_update.update(step)

    def finish(self, step: Step) -> dict[str, float]:
        step.share(self.learner.ranks)
        if self._on_facts is not None:
            with step.clock("facts"):
                self._on_facts(token_facts(step, self.algorithm))
        num_tokens = sum(map(len, step.sequences))
        self.total_tokens += num_tokens
        metrics = step.all_metrics(self.algorithm)
        flops = sum(learner.take_flops() for learner in self.learners.values())
        mfu = flops / metrics["seconds_step"] / peak_flops(self.device, self.learner.dtype)
        return metrics | {"tokens": float(num_tokens), "total_tokens": float(self.total_tokens), "mfu": mfu}

    @torch.no_grad()
    def logprobs_of(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """Return the policy's log-probs ``[S]`` of trained tokens, on every rank: untruncated, at temperature 1."""
        cut = StepCut(sequences, self._policy, ranks=Ranks(), device=self.device)
        logprobs = torch.zeros(sum(sequence.num_trained_tokens for sequence in sequences), device=self.device)
        for microbatch in cut(range(len(sequences)), self.config.max_tokens_per_microbatch):
            with self.learner.autocast():
                scores = self._policy(microbatch.packed, truncated=False, temperature=1.0)
            logprobs[microbatch.tokens] = scores.logprobs.float()
        return logprobs

    def counters(self) -> dict[str, Any]:
        """Return the other state that a resumed run needs, as JSON values."""
        return {"kl_controller": {"coef": self.algorithm.kl_coef}, "total_tokens": self.total_tokens}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self.algorithm.kl_coef = counters["kl_controller"].get("coef", self.algorithm.kl_coef)
        self.total_tokens = counters.get("total_tokens", 0)
