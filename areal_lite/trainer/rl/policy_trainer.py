"""One step of reinforcement learning, stage by stage: log-probs, values, rewards, advantages, updates.

Guarantees that loss and gradients do not depend on how the step is cut into micro-batches and over
ranks, that the same seed and batch give bit-equal weights on one machine, and that a non-finite update
is never applied. Knows nothing of servers or files: a batch comes in, metrics go out.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.errors import ConfigError, TrainingError
from areal_lite.models.kernels.score_operations import TokenScores
from areal_lite.models.lora import adapters_off
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.parallel.sharding import shard
from areal_lite.models.policy_model import load_policy, resolve_device
from areal_lite.models.truncation import Truncation
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.forward.packed_model import PackedSequences
from areal_lite.trainer.forward.scalar_model import ValueScorer, load_critic
from areal_lite.trainer.learner import Learner, Update
from areal_lite.trainer.machine_metrics import FlopsMeter
from areal_lite.trainer.objectives.aggregation import AggregationMode, aggregate, token_weights
from areal_lite.trainer.objectives.kl import kl_penalty
from areal_lite.trainer.objectives.policy_loss import PolicyInputs, value_loss
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.policy_step import Batch, Step
from areal_lite.trainer.rl.step_tokens import Microbatch, StepCut, split_groups
from areal_lite.trainer.rl.token_facts import TokenFacts, token_facts
from areal_lite.trainer.seeding import seed_process

logger = logging.getLogger(__name__)

OnSkip = Callable[[dict[str, Any]], None]
"""Called with step, role, loss, gradient norm and task ids of a skipped non-finite update."""
OnFacts = Callable[[TokenFacts], None]
"""Called on every rank with what each step computed for its tokens."""


class PolicyTrainer:
    """Owns the policy being trained, and the frozen reference and the critic if the config has them.

    A step is :meth:`begin`, the stages in source order, then :meth:`finish`; :meth:`train_step` runs all of them.

    Args:
        model_path: Folder of a Hugging Face causal LM, or a hub name.
        seed: Seeds python, numpy and torch, and the order of minibatches.
        temperature: Sampling temperature of the inference engine; log-probs at use the same.
        truncation: Truncated sampling of the inference engine, which the log-probs of the loss replay.
        max_new_tokens: Length limit of an answer, for the share of truncated answers and the overlong penalty.
        on_skip: Called with updates that were skipped.
        on_facts: Called at the end of each step; None saves the communication.

    Raises:
        ConfigError: If the model cannot be loaded, the device is missing, the temperature is not above 0, or an
            algorithm is unknown or lacks an input.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model_path: str,
        seed: int,
        temperature: float = 1.0,
        truncation: Truncation | None = None,
        max_new_tokens: int | None = None,
        on_skip: OnSkip | None = None,
        on_facts: OnFacts | None = None,
    ) -> None:
        self.config = config
        self.seed = seed
        self.algorithm = Algorithm(config, max_new_tokens=max_new_tokens)
        self._max_new_tokens = max_new_tokens
        seed_process(seed, num_threads=config.num_threads, deterministic=config.deterministic)
        self.device = resolve_device(config.device)
        recompute = config.gradient_checkpointing
        self.model: Any = load_policy(
            model_path, device=self.device, gradient_checkpointing=recompute, lora=config.lora
        )
        self._policy = TokenScorer(self.model, temperature=temperature, truncation=truncation)
        if config.deterministic and config.dtype == "float32":
            self._policy.read_exactly()
        self._reference: TokenScorer | None = None
        if config.kl is not None:
            # Under adapters the reference is the model without them.
            self._reference = self._policy if config.lora else shard(copy.deepcopy(self._policy).requires_grad_(False))
        self.learner = Learner(self._policy, config, config, total_steps=config.steps)
        self.critic: Learner | None = None
        if config.critic is not None:
            path = config.critic.model_path or model_path
            critic = ValueScorer(load_critic(path, device=self.device, gradient_checkpointing=recompute))
            self.critic = Learner(critic, config, config.critic, total_steps=config.steps)
        self.total_tokens = 0
        """Tokens of all batches so far, prompts included."""
        self._meter = FlopsMeter(self.device, config.dtype)
        self._on_skip = on_skip
        self._on_facts = on_facts
        self._warned = False

    @property
    def steps_done(self) -> int:
        """Training steps finished."""
        return self.learner.steps_done

    def train_step(self, batch: Batch, *, version: int) -> dict[str, float]:
        """Train on one batch of groups and return its metrics.

        Sequences without a gradient (advantage 0 and neither KL nor entropy term, or no trained token) skip the
        forward pass but stay in every denominator; the metrics ``computed_tokens`` and ``trained_tokens`` show how
        many, and token statistics cover computed ones only.

        Args:
            batch: Groups as the engine returns them (only accepted ones train), or a ``DataProto`` with the keys of
                :mod:`areal_lite.data.batch.training_batch`. Whole groups, in any order.

        Raises:
            ValueError: If a ``DataProto`` breaks a rule of a training batch.
            ConfigError: If a trajectory has no reward.
            TrainingError: If nothing in the batch trains, a sequence has multi-modal inputs, an input of the
                advantages is not finite, or three updates in a row are not.
        """
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

    # -- the stages, in order ----------------------------------------------------------------------

    def begin(self, batch: Batch, *, version: int) -> Step:
        """Check the batch, lay out its tokens and choose the minibatches; see :meth:`train_step`."""
        step = Step.of(batch, version=version, device=self.device)
        multi_modal = sum(bool(sequence.multi_modal_inputs) for sequence in step.sequences)
        if multi_modal:
            raise TrainingError(
                f"step {self.steps_done}: {multi_modal} of {len(step.sequences)} sequences have multi_modal_inputs, "
                "but this trainer's forward pass reads tokens alone, so log-probs would be wrong: train on text only"
            )
        step.minibatches = split_groups(
            step.sequences,
            self.config.minibatches_per_step,
            rng=np.random.default_rng([self.seed, self.steps_done]),
        )
        if not step.minibatches:
            raise TrainingError(
                f"step {self.steps_done}: none of the {len(step.sequences)} sequences has a trained token: "
                "loss_mask must be True where the policy sampled"
            )
        step.metrics |= self.algorithm.shape_rewards(step.scores, step.tokens)
        return step

    def score_proximal(self, step: Step) -> None:
        """Fill in the log-probs at the start of the step, if a stage before the update needs them.

        The first update's own forward pass runs on the same weights, so most steps need no pass of their own.
        """
        if self.config.proximal == "behaviour":
            if bool(step.tokens.behaviour.isnan().any()):
                raise ConfigError(
                    "trainer.proximal is 'behaviour', but the batch has tokens without recorded log-probs: "
                    "return 'logprobs' from the workflow, or set trainer.proximal: trainer"
                )
            step.tokens.proximal.copy_(step.tokens.behaviour)
            step.tokens.known.fill_(True)
        elif self.algorithm.needs_proximal_early:
            self._score_proximal(step, step.all_indices)

    def score_reference(self, step: Step) -> None:
        """Fill in the frozen model's log-probs."""
        if (reference := self._reference) is None:
            return
        off: AbstractContextManager[Any] = adapters_off(self.model) if self.config.lora else nullcontext()
        with step.clock("reference"), off:
            scored = self._scored(
                step,
                step.all_indices,
                self.learner,
                reference,
                lambda packed: {"reference": reference(packed, truncated=False).logprobs},
            )
        step.tokens.fill(step.all_indices, scored)

    def score_values(self, step: Step) -> None:
        """Fill in the critic's values."""
        if (critic := self.critic) is None:
            return
        with step.clock("values"):
            scored = self._scored(
                step,
                step.all_indices,
                critic,
                critic.module,
                lambda packed: {"values": critic.module(packed)},
            )
        step.tokens.fill(step.all_indices, scored)

    def penalize_kl(self, step: Step) -> None:
        """Subtract the KL penalty from the reward of each token, if ``trainer.kl`` places it there."""
        if self.algorithm.penalizes_reward:
            step.check_finite("proximal", "reference")
            step.metrics |= self.algorithm.penalize(step.tokens, len(step.scores))

    def correct(self, step: Step) -> None:
        """Fill in off-policy correction weights; the update does it if log-probs are known only then."""
        if self.algorithm.needs_proximal_early:
            tokens = step.tokens
            tokens.correction = self.algorithm.correction(
                tokens.proximal, tokens.behaviour_or_proximal(), tokens.episodes
            )

    def estimate_advantages(self, step: Step) -> None:
        """Compute each token's advantage from rewards and, with a critic, values."""
        with step.clock("advantages"):
            step.check_finite("rewards", "values", "proximal", "sum_squared_probs", "correction")
            turns = step.turns() if "turns" in self.algorithm.needs else None
            self.algorithm.advantages(step.tokens, step.scores, step.baselines, step.group_ids, turns)
        self._warn_of_turn_rewards(step)

    def _warn_of_turn_rewards(self, step: Step) -> None:
        if self._warned or "turns" in self.algorithm.needs:
            return
        scores = step.scores.tolist()
        for sequence, episode in zip(step.sequences, step.episodes, strict=True):
            if np.float32(sequence.reward) != np.float32(scores[episode]):
                self._warned = True
                logger.warning(
                    "task %s rewards its turns one by one, but trainer.advantage %s compares whole episodes, by their "
                    "mean reward; turn_grpo and turn_returns compare turns",
                    sequence.task_id,
                    self.config.advantage,
                )
                return

    def update_critic(self, step: Step) -> None:
        """Fit the critic's values to the returns, one update per minibatch."""
        critic, config, tokens = self.critic, self.config.critic, step.tokens
        if critic is None:
            return
        assert config is not None
        scorer: Any = critic.module

        def loss(microbatch: Microbatch, weights: Tensor) -> Tensor:
            at = microbatch.tokens
            self._meter.count(critic.passes * scorer.flops(microbatch.packed))
            with step.clock("forward"), critic.autocast():
                values = scorer(microbatch.packed)
            if not microbatch.counts:
                return zero_loss(values)
            terms = value_loss(values, tokens.values[at], tokens.returns[at], clip=config.clip_eps)
            step.record_statistics(at, terms.statistics)
            return aggregate(terms.losses, weights[at])

        rate = critic.learning_rate
        updates = [
            self._update(step, critic, chosen, chosen, AggregationMode.TOKEN_MEAN, loss) for chosen in step.minibatches
        ]
        critic.steps_done += 1
        step.metrics |= {f"critic_{name}": value for name, value in _mean_update(updates, rate).items()}

    def update_policy(self, step: Step) -> None:
        """Train the policy, one update per minibatch."""
        config, tokens = self.config, step.tokens
        rate = self.learner.learning_rate
        updates: list[Update] = []
        if config.critic is None or self.steps_done >= config.critic.updates_before_policy:
            trains = self._with_gradient(step)
            computed = [[i for i in chosen if trains[step.episodes[i]]] for chosen in step.minibatches]
            later = [index for chosen in computed[1:] for index in chosen]
            ahead = step.all_indices if self.algorithm.chooses else later
            if ahead and not bool(tokens.known.any()):
                self._score_proximal(step, ahead)
            if config.proximal == "trainer":
                # The first minibatch is scored by the same weights in its own pass: its ratio is exactly 1.
                tokens.known[tokens.chosen(step.minibatches[0])] = False
            if not any(computed):
                self._measure(step)
            loss = partial(self._policy_update_loss, step)
            for chosen, computing in zip(step.minibatches, computed, strict=True):
                if self.algorithm.chooses:
                    self._choose(step, chosen, first=not updates)
                mode = self.algorithm.aggregation
                updates.append(self._update(step, self.learner, chosen, computing, mode, loss))
        self.learner.steps_done += 1
        step.metrics |= _mean_update(updates, rate)

    def finish(self, step: Step) -> dict[str, float]:
        """Return the metrics of the step."""
        if self._on_facts is not None:
            with step.clock("facts"):
                self._on_facts(token_facts(step, self.algorithm, self.learner.ranks))
        num_tokens = sum(map(len, step.sequences))
        self.total_tokens += num_tokens
        metrics = step.all_metrics(
            ranks=self.learner.ranks,
            has_critic=self.critic is not None,
            penalized=self.algorithm.penalizes_reward,
            compares_engine=self.config.proximal == "trainer",
            max_new_tokens=self._max_new_tokens,
        )
        mfu = self._meter.take_mfu(metrics["seconds_step"])
        return metrics | {"tokens": float(num_tokens), "total_tokens": float(self.total_tokens), "mfu": mfu}

    @torch.no_grad()
    def logprobs_of(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """Return the policy's log-probs ``[S]`` of the sequences' trained tokens, on every rank.

        They are of the whole vocabulary at temperature 1.
        """
        cut = StepCut(sequences, self._policy, ranks=Ranks(), device=self.device)
        logprobs = torch.zeros(sum(sequence.num_trained_tokens for sequence in sequences), device=self.device)
        temperature, self._policy.temperature = self._policy.temperature, 1.0
        try:
            for microbatch in cut(range(len(sequences)), self.config.max_tokens_per_microbatch):
                with self.learner.autocast():
                    logprobs[microbatch.tokens] = self._policy(microbatch.packed, truncated=False).logprobs.float()
        finally:
            self._policy.temperature = temperature
        return logprobs

    # -- what a checkpoint holds beside the learners ------------------------------------------------

    @property
    def learners(self) -> dict[str, Learner]:
        """The models being trained, by role."""
        return {"policy": self.learner} | ({"critic": self.critic} if self.critic is not None else {})

    def counters(self) -> dict[str, Any]:
        """Return the other state that a resumed run needs, as JSON values."""
        return {"kl_controller": self.algorithm.kl_controller.state(), "total_tokens": self.total_tokens}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore :meth:`counters`."""
        self.algorithm.kl_controller.load_state(counters["kl_controller"])
        self.total_tokens = counters.get("total_tokens", 0)

    # -- forward passes and losses -----------------------------------------------------------------

    def _score_proximal(self, step: Step, chosen: Sequence[int]) -> None:
        def score(packed: PackedSequences) -> dict[str, Tensor]:
            scores = self._policy(packed)
            return self._at_start(scores) | {"sum_squared_probs": scores.sum_squared_probs}

        with step.clock("proximal"):
            scored = self._scored(step, chosen, self.learner, self._policy, score)
        step.tokens.fill(chosen, scored)
        step.tokens.known |= step.tokens.chosen(chosen)

    def _at_start(self, scores: TokenScores) -> dict[str, Tensor]:
        """Return the columns of the step that the weights at its start give."""
        columns = {"proximal": scores.logprobs.detach()}
        truncation = self._policy.truncation
        return columns if truncation is None or truncation.reported else columns | {"log_kept": scores.log_kept}

    @torch.no_grad()
    def _measure(self, step: Step) -> None:
        """Record the statistics of the policy in a step that trains nothing, because no episode has a gradient."""

        def score(packed: PackedSequences) -> dict[str, Tensor]:
            scores = self._policy(packed)
            own = {"policy": scores.logprobs, "entropy": scores.entropy, "kept_mass": scores.log_kept.exp()}
            return own | self._at_start(scores)

        with step.clock("proximal"):
            scored = self._scored(step, step.all_indices, self.learner, self._policy, score)
        tokens, everywhere = step.tokens, torch.ones_like(step.tokens.known)
        policy, entropy, kept_mass = (scored.pop(name) for name in ("policy", "entropy", "kept_mass"))
        if not bool(tokens.known.all()):
            tokens.fill(step.all_indices, scored)
        if not self.algorithm.needs_proximal_early:
            tokens.correction = self.algorithm.correction(
                tokens.proximal, tokens.behaviour_or_proximal(), tokens.episodes
            )
        own = {"entropy": entropy, "correction_weight": tokens.correction}
        if self._policy.truncation is not None:
            own["kept_mass"] = kept_mass
        step.record_statistics(
            everywhere, self.algorithm.policy_loss(self._inputs(step, policy, everywhere)).statistics | own
        )
        step.measured = True

    @torch.no_grad()
    def _choose(self, step: Step, chosen: Sequence[int], *, first: bool) -> None:
        """Let the loss choose among all tokens of a minibatch, so that the cut does not change its choice."""
        at, policy = step.tokens.chosen(chosen), step.tokens.proximal
        if not first or self.config.proximal == "behaviour":
            with step.clock("choice"):
                policy = self._scored(
                    step,
                    chosen,
                    self.learner,
                    self._policy,
                    lambda packed: {"": self._policy(packed).logprobs},
                )[""]
        step.choice = None
        choice = self.algorithm.policy_loss(self._inputs(step, policy[at], at)).chosen
        assert choice is not None
        step.choice = torch.zeros_like(at).masked_scatter(at, choice)

    def _inputs(self, step: Step, policy: Tensor, at: Tensor) -> PolicyInputs:
        tokens = step.tokens
        return PolicyInputs(
            policy=policy,
            proximal=tokens.proximal[at],
            behaviour=tokens.behaviour_or_proximal()[at],
            advantages=tokens.advantages[at],
            episodes=tokens.episodes[at],
            chosen=None if step.choice is None else step.choice[at],
        )

    @torch.no_grad()
    def _scored(
        self,
        step: Step,
        chosen: Sequence[int],
        learner: Learner,
        model: Any,
        score: Callable[[PackedSequences], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """Return the values ``[T]`` of ``score`` at the chosen sequences' tokens, over all ranks; 0 elsewhere."""

        def run(max_tokens: int) -> dict[str, Tensor]:
            scored: dict[str, Tensor] = {}
            for microbatch in self._cut(step, model, chosen)(max_tokens):
                self._meter.count(model.flops(microbatch.packed))
                with learner.autocast():
                    scores = score(microbatch.packed)
                for name, values in scores.items():
                    column = scored.setdefault(name, torch.zeros_like(step.tokens.proximal))
                    if microbatch.counts:
                        column[microbatch.tokens] = values.float()
            return scored

        return {name: learner.ranks.sum_(values) for name, values in learner.within_memory(run).items()}

    def _update(
        self,
        step: Step,
        learner: Learner,
        counted: Sequence[int],
        computed: Sequence[int],
        mode: AggregationMode,
        loss: Callable[[Microbatch, Tensor], Tensor],
    ) -> Update:
        """Make one update: ``computed`` sequences go through the model, ``counted`` ones are averaged over."""
        at = step.tokens.chosen(counted)
        weights = torch.zeros_like(step.tokens.proximal)
        weights[at] = token_weights(mode, step.tokens.episodes[at], scale=self.config.loss_scale).float()
        cut = self._cut(step, learner.module, computed)
        update = learner.update(cut, lambda microbatch: loss(microbatch, weights), clock=step.clock)
        if not update.applied:
            task_ids = list(dict.fromkeys(step.sequences[index].task_id for index in counted))
            role = "critic" if learner is self.critic else "policy"
            skipped = {"step": self.steps_done, "role": role, **update._asdict(), "task_ids": task_ids}
            logger.warning("skipped a non-finite update: %s", skipped | {"task_ids": len(task_ids)})
            if self._on_skip is not None:
                self._on_skip(skipped)
        learner.check(update)
        return update

    def _cut(self, step: Step, model: Any, chosen: Sequence[int]) -> Callable[[int], Iterator[Microbatch]]:
        together = step.episodes if self.algorithm.couples_tokens else None
        cut = StepCut(step.sequences, model, ranks=self.learner.ranks, device=self.device, together=together)
        return partial(cut, chosen)

    def _with_gradient(self, step: Step) -> list[bool]:
        """Return whether each episode must be computed; all loss terms of the others are 0."""
        if self.algorithm.needs_every_episode:
            return [True] * len(step.scores)
        trains = torch.zeros(len(step.scores), dtype=torch.bool, device=self.device)
        trains[step.tokens.episodes[step.tokens.advantages != 0]] = True
        return [bool(value) for value in trains.tolist()]

    def _policy_update_loss(self, step: Step, microbatch: Microbatch, weights: Tensor) -> Tensor:
        tokens, config, at = step.tokens, self.config, microbatch.tokens
        self._meter.count(self.learner.passes * self._policy.flops(microbatch.packed))
        with step.clock("forward"), self.learner.autocast():
            scores = self._policy(microbatch.packed, entropy_grad=config.entropy_coef != 0)
        if not microbatch.counts:
            return zero_loss(scores.logprobs)
        tokens.computed[at] = True
        tokens.policy[at] = scores.logprobs.detach()
        if not bool(tokens.known[at].all()):
            for name, values in self._at_start(scores).items():
                getattr(tokens, name)[at] = values
        terms = self.algorithm.policy_loss(self._inputs(step, scores.logprobs, at))
        if not self.algorithm.needs_proximal_early:
            tokens.correction[at] = self.algorithm.correction(
                tokens.proximal[at], tokens.behaviour_or_proximal()[at], tokens.episodes[at]
            )
        own = {"entropy": scores.entropy, "correction_weight": tokens.correction[at]}
        if self._policy.truncation is not None:
            own["kept_mass"] = scores.log_kept.exp()
        step.record_statistics(at, terms.statistics | own)
        losses = tokens.correction[at] * terms.losses
        if config.kl is not None:
            behaviour = tokens.behaviour_or_proximal()[at] if config.kl.unbiased else None
            penalty = kl_penalty(scores.logprobs, tokens.reference[at], config.kl.estimator, behaviour=behaviour)
            step.record_statistics(at, {"kl": penalty})
            if not self.algorithm.penalizes_reward:
                losses = losses + config.kl.coef * penalty
        if config.entropy_coef != 0:
            losses = losses - config.entropy_coef * scores.entropy
        return aggregate(losses, weights[at])


def zero_loss(outputs: Tensor) -> Tensor:
    """Return a loss of 0 with a gradient, so that this rank joins the backward pass."""
    return (outputs * 0.0).sum()


def _mean_update(updates: Sequence[Update], rate: float) -> dict[str, float]:
    """Return loss and gradient norm averaged over a step's updates; 0 if there was none."""
    return {
        "loss": float(np.mean([update.loss for update in updates])) if updates else 0.0,
        "grad_norm": float(np.mean([update.grad_norm for update in updates])) if updates else 0.0,
        "skipped_updates": float(sum(not update.applied for update in updates)),
        "learning_rate": rate,
    }
