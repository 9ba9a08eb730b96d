"""The updates of a step: forward passes of one learner over its sequences, then those of the critic and the policy.

Guarantees that results do not depend on how the step is cut into micro-batches and over ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_lite.config.trainer_config import AggregationMode, CriticConfig, TrainerConfig
from areal_lite.models.kernels.score_operations import TokenScores
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.forward.packed_model import PackedSequences
from areal_lite.trainer.learner import Learner, Update
from areal_lite.trainer.machine_metrics import FlopsMeter
from areal_lite.trainer.objectives.aggregation import aggregate, token_weights
from areal_lite.trainer.objectives.kl import kl_penalty
from areal_lite.trainer.objectives.policy_loss import PolicyInputs, value_loss
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.policy_step import Step
from areal_lite.trainer.rl.step_tokens import Microbatch, StepCut

logger = logging.getLogger(__name__)

OnSkip = Callable[[dict[str, Any]], None]
"""Called with step, role, loss, gradient norm and task ids of a skipped non-finite update."""


class LearnerPasses:
    """Runs a learner on a step; ``role`` is its name in reports of skipped updates."""

    def __init__(
        self,
        learner: Learner,
        role: str,
        config: TrainerConfig,
        algorithm: Algorithm,
        meter: FlopsMeter,
        on_skip: OnSkip | None,
    ) -> None:
        self.learner = learner
        self.meter = meter
        self._role = role
        self._config = config
        self._algorithm = algorithm
        self._on_skip = on_skip

    @torch.no_grad()
    def scored(
        self, step: Step, chosen: Sequence[int], model: Any, score: Callable[[PackedSequences], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the values ``[T]`` of ``score`` at the chosen sequences' tokens, over all ranks; 0 elsewhere."""

        def run(max_tokens: int) -> dict[str, Tensor]:
            scored: dict[str, Tensor] = {}
            for microbatch in self._cut(step, model, chosen)(max_tokens):
                self.meter.count(model.flops(microbatch.packed))
                with self.learner.autocast():
                    scores = score(microbatch.packed)
                for name, values in scores.items():
                    column = scored.setdefault(name, torch.zeros_like(step.tokens.proximal))
                    if microbatch.counts:
                        column[microbatch.tokens] = values.float()
            return scored

        return {name: self.learner.ranks.sum_(values) for name, values in self.learner.within_memory(run).items()}

    def update(
        self,
        step: Step,
        counted: Sequence[int],
        computed: Sequence[int],
        mode: AggregationMode,
        loss: Callable[[Microbatch, Tensor], Tensor],
    ) -> Update:
        """Make one update: ``computed`` sequences go through the model, ``counted`` ones are averaged over."""
        at = step.tokens.chosen(counted)
        weights = torch.zeros_like(step.tokens.proximal)
        weights[at] = token_weights(mode, step.tokens.episodes[at], scale=self._config.loss_scale).float()
        cut = self._cut(step, self.learner.module, computed)
        update = self.learner.update(cut, lambda microbatch: loss(microbatch, weights), clock=step.clock)
        if not update.applied:
            task_ids = list(dict.fromkeys(step.sequences[index].task_id for index in counted))
            skipped = {"step": self.learner.steps_done, "role": self._role, **update._asdict(), "task_ids": task_ids}
            logger.warning("skipped a non-finite update: %s", skipped | {"task_ids": len(task_ids)})
            if self._on_skip is not None:
                self._on_skip(skipped)
        self.learner.check(update)
        return update

    def _cut(self, step: Step, model: Any, chosen: Sequence[int]) -> Callable[[int], Iterator[Microbatch]]:
        together = step.episodes if self._algorithm.couples_tokens else None
        cut = StepCut(step.sequences, model, ranks=self.learner.ranks, device=step.scores.device, together=together)
        return partial(cut, chosen)


def zero_loss(outputs: Tensor) -> Tensor:
    """Return a loss of 0 with a gradient, so that this rank joins the backward pass."""
    return (outputs * 0.0).sum()


def mean_update(updates: Sequence[Update], rate: float) -> dict[str, float]:
    """Return loss and gradient norm averaged over a step's updates; 0 if there was none."""
    return {
        "loss": float(np.mean([update.loss for update in updates])) if updates else 0.0,
        "grad_norm": float(np.mean([update.grad_norm for update in updates])) if updates else 0.0,
        "skipped_updates": float(sum(not update.applied for update in updates)),
        "learning_rate": rate,
    }


class CriticUpdate:
    def __init__(self, passes: LearnerPasses, config: CriticConfig) -> None:
        self._passes = passes
        self._learner = passes.learner
        self._scorer: Any = passes.learner.module
        self._clip_eps = config.clip_eps

    def score(self, step: Step) -> None:
        with step.clock("values"):
            scored = self._passes.scored(
                step, step.all_indices, self._scorer, lambda packed: {"values": self._scorer(packed)}
            )
        step.tokens.fill(step.all_indices, scored)

    def update(self, step: Step) -> None:
        tokens = step.tokens

        def loss(microbatch: Microbatch, weights: Tensor) -> Tensor:
            at = microbatch.tokens
            self._passes.meter.count(self._learner.passes * self._scorer.flops(microbatch.packed))
            with step.clock("forward"), self._learner.autocast():
                values = self._scorer(microbatch.packed)
            if not microbatch.counts:
                return zero_loss(values)
            terms = value_loss(values, tokens.values[at], tokens.returns[at], clip=self._clip_eps)
            step.record_statistics(at, terms.statistics)
            return aggregate(terms.losses, weights[at])

        rate = self._learner.learning_rate
        updates = [self._passes.update(step, chosen, chosen, "token-mean", loss) for chosen in step.minibatches]
        self._learner.steps_done += 1
        step.metrics |= {f"critic_{name}": value for name, value in mean_update(updates, rate).items()}


class PolicyUpdate:
    def __init__(self, passes: LearnerPasses, scorer: TokenScorer, config: TrainerConfig, algorithm: Algorithm) -> None:
        self._passes = passes
        self._learner = passes.learner
        self._scorer = scorer
        self._config = config
        self._algorithm = algorithm

    def update(self, step: Step) -> None:
        config, tokens = self._config, step.tokens
        rate = self._learner.learning_rate
        updates: list[Update] = []
        if config.critic is None or self._learner.steps_done >= config.critic.updates_before_policy:
            trains = self._with_gradient(step)
            computed = [[i for i in chosen if trains[step.episodes[i]]] for chosen in step.minibatches]
            later = [index for chosen in computed[1:] for index in chosen]
            ahead = step.all_indices if self._algorithm.chooses else later
            if ahead and not bool(tokens.known.any()):
                self.score_proximal(step, ahead)
            if config.proximal == "trainer":
                # The first minibatch is scored by the same weights in its own pass: its ratio is exactly 1.
                tokens.known[tokens.chosen(step.minibatches[0])] = False
            if not any(computed):
                self._measure(step)
            loss = partial(self._loss, step)
            for chosen, computing in zip(step.minibatches, computed, strict=True):
                if self._algorithm.chooses:
                    self._choose(step, chosen, first=not updates)
                mode = self._algorithm.aggregation
                updates.append(self._passes.update(step, chosen, computing, mode, loss))
        self._learner.steps_done += 1
        step.metrics |= mean_update(updates, rate)

    def score_proximal(self, step: Step, chosen: Sequence[int]) -> None:
        """Fill in the current weights' log-probs of the chosen sequences, as those of the start of the step."""

        def score(packed: PackedSequences) -> dict[str, Tensor]:
            scores = self._scorer(packed)
            return self._at_start(scores) | {"sum_squared_probs": scores.sum_squared_probs}

        with step.clock("proximal"):
            scored = self._passes.scored(step, chosen, self._scorer, score)
        step.tokens.fill(chosen, scored)
        step.tokens.known |= step.tokens.chosen(chosen)

    def _at_start(self, scores: TokenScores) -> dict[str, Tensor]:
        """Return the columns of the step that the weights at its start give."""
        columns = {"proximal": scores.logprobs.detach()}
        truncation = self._scorer.truncation
        return columns if truncation is None or truncation.reported else columns | {"log_kept": scores.log_kept}

    @torch.no_grad()
    def _measure(self, step: Step) -> None:
        """Record the statistics of the policy in a step that trains nothing, because no episode has a gradient."""

        def score(packed: PackedSequences) -> dict[str, Tensor]:
            scores = self._scorer(packed)
            own = {"policy": scores.logprobs, "entropy": scores.entropy, "kept_mass": scores.log_kept.exp()}
            return own | self._at_start(scores)

        with step.clock("proximal"):
            scored = self._passes.scored(step, step.all_indices, self._scorer, score)
        tokens, everywhere = step.tokens, torch.ones_like(step.tokens.known)
        policy, entropy, kept_mass = (scored.pop(name) for name in ("policy", "entropy", "kept_mass"))
        if not bool(tokens.known.all()):
            tokens.fill(step.all_indices, scored)
        if not self._algorithm.needs_proximal_early:
            tokens.correction = self._algorithm.correction(
                tokens.proximal, tokens.behaviour_or_proximal(), tokens.episodes
            )
        own = {"entropy": entropy, "correction_weight": tokens.correction}
        if self._scorer.truncation is not None:
            own["kept_mass"] = kept_mass
        step.record_statistics(
            everywhere, self._algorithm.policy_loss(self._inputs(step, policy, everywhere)).statistics | own
        )
        step.measured = True

    @torch.no_grad()
    def _choose(self, step: Step, chosen: Sequence[int], *, first: bool) -> None:
        """Let the loss choose among all tokens of a minibatch, so that the cut does not change its choice."""
        at, policy = step.tokens.chosen(chosen), step.tokens.proximal
        if not first or self._config.proximal == "behaviour":
            with step.clock("choice"):
                policy = self._passes.scored(
                    step, chosen, self._scorer, lambda packed: {"": self._scorer(packed).logprobs}
                )[""]
        step.choice = None
        choice = self._algorithm.policy_loss(self._inputs(step, policy[at], at)).chosen
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

    def _with_gradient(self, step: Step) -> list[bool]:
        """Return whether each episode must be computed; all loss terms of the others are 0."""
        if self._algorithm.needs_every_episode:
            return [True] * len(step.scores)
        trains = torch.zeros(len(step.scores), dtype=torch.bool, device=step.scores.device)
        trains[step.tokens.episodes[step.tokens.advantages != 0]] = True
        return [bool(value) for value in trains.tolist()]

    def _loss(self, step: Step, microbatch: Microbatch, weights: Tensor) -> Tensor:
        tokens, config, at = step.tokens, self._config, microbatch.tokens
        self._passes.meter.count(self._learner.passes * self._scorer.flops(microbatch.packed))
        with step.clock("forward"), self._learner.autocast():
            scores = self._scorer(microbatch.packed, entropy_grad=config.entropy_coef != 0)
        if not microbatch.counts:
            return zero_loss(scores.logprobs)
        tokens.computed[at] = True
        tokens.policy[at] = scores.logprobs.detach()
        if not bool(tokens.known[at].all()):
            for name, values in self._at_start(scores).items():
                getattr(tokens, name)[at] = values
        terms = self._algorithm.policy_loss(self._inputs(step, scores.logprobs, at))
        if not self._algorithm.needs_proximal_early:
            tokens.correction[at] = self._algorithm.correction(
                tokens.proximal[at], tokens.behaviour_or_proximal()[at], tokens.episodes[at]
            )
        own = {"entropy": scores.entropy, "correction_weight": tokens.correction[at]}
        if self._scorer.truncation is not None:
            own["kept_mass"] = scores.log_kept.exp()
        step.record_statistics(at, terms.statistics | own)
        losses = tokens.correction[at] * terms.losses
        if config.kl is not None:
            behaviour = tokens.behaviour_or_proximal()[at] if config.kl.unbiased else None
            penalty = kl_penalty(scores.logprobs, tokens.reference[at], config.kl.estimator, behaviour=behaviour)
            step.record_statistics(at, {"kl": penalty})
            if not self._algorithm.penalizes_reward:
                losses = losses + config.kl.coef * penalty
        if config.entropy_coef != 0:
            losses = losses - config.entropy_coef * scores.entropy
        return aggregate(losses, weights[at])
