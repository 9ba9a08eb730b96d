"""Forward passes and updates of one learner over the sequences of a step.

Guarantees that results do not depend on how the step is cut into micro-batches and over ranks. Knows nothing of losses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_lite.config.trainer_config import AggregationMode, TrainerConfig
from areal_lite.trainer.forward.packed_model import PackedSequences
from areal_lite.trainer.learner import Learner, Update
from areal_lite.trainer.machine_metrics import FlopsMeter
from areal_lite.trainer.objectives.aggregation import token_weights
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
        self,
        step: Step,
        chosen: Sequence[int],
        model: Any,
        score: Callable[[PackedSequences], dict[str, Tensor]],
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
