"""The critic in a step: values of tokens before the policy learns, then an update towards the returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from areal_lite.config.trainer_config import CriticConfig
from areal_lite.trainer.objectives.aggregation import aggregate
from areal_lite.trainer.objectives.policy_loss import value_loss
from areal_lite.trainer.rl.learner_passes import LearnerPasses, mean_update, zero_loss
from areal_lite.trainer.rl.policy_step import Step
from areal_lite.trainer.rl.step_tokens import Microbatch


class CriticUpdate:
    """Scores and trains the critic."""

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
        """Fit the values to the returns, one update per minibatch."""
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
