"""Evaluation: the rewards of the held-out rows under one policy version."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_lite.api.engine_api import Row
from areal_lite.api.trajectory import EpisodeStatus, Group
from areal_lite.config.run_config import RunConfig
from areal_lite.errors import EpisodeError
from areal_lite.rollout.episodes.ended_groups import PASSING, advice
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.run_data import WorkflowChoice
from areal_lite.trainer.rl.validation_metrics import validation_metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rewards on the held-out rows."""

    reward: float  # mean over all episodes that gave one
    episodes: int
    failed: int  # rows whose group was not accepted
    seconds: float
    others: dict[str, float] = field(default_factory=dict)
    """Further metrics: means of what the episodes recorded, and :func:`validation_metrics`."""

    def metrics(self) -> dict[str, float]:
        own = {name: float(getattr(self, name)) for name in ("reward", "episodes", "failed", "seconds")}
        return self.others | {f"eval/{name}": value for name, value in own.items()}


def evaluate(engine: RemoteInfEngine, config: RunConfig, rows: Sequence[Row], workflow: WorkflowChoice) -> Evaluation:
    """Run the workflow on each of the rows, ``evaluation.group_size`` times."""
    logger.info("evaluating %d held-out rows", len(rows))
    clock = time.monotonic()
    groups = engine.rollout_batch(
        rows,
        workflow.workflow,
        workflow.kwargs(config, config.rollout.eval_gconfig),
        group_size=config.evaluation.group_size,
        is_eval=True,
    )
    rewards = [reward for group in groups for reward in group.rewards]
    failed = [group for group in groups if group.status is not EpisodeStatus.ACCEPTED]
    if not rewards:
        raise no_success(failed)
    return Evaluation(
        reward=sum(rewards) / len(rewards),
        episodes=len(rewards),
        failed=len(failed),
        seconds=time.monotonic() - clock,
        others=engine.take_scalars(is_eval=True) | _by_data_source(groups, config.evaluation.group_size),
    )


def no_success(groups: Sequence[Group]) -> EpisodeError:
    causes = Counter(group.failure.summary if group.failure else group.rejection for group in groups)
    text = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
    if fix := advice(group.rejection for group in groups if group.rejection):
        text += f": {fix}"
    kinds = {group.failure.kind for group in groups if group.failure is not None}
    may_pass = bool(kinds) and kinds <= PASSING
    return EpisodeError(f"no episode on the {len(groups)} rows gave a reward: {text}", may_pass=may_pass)


def _by_data_source(groups: Sequence[Group], group_size: int) -> dict[str, float]:
    """Return mean@N, best@N, worst@N of each data source; nothing if that is the mean reward alone."""
    judged = [
        (reward, str(place), str(group.data.get("data_source", "held_out")))
        for place, group in enumerate(groups)
        for reward in group.rewards
    ]
    rewards, places, sources = zip(*judged, strict=True)
    if group_size == 1 and set(sources) == {"held_out"}:
        return {}
    figures = validation_metrics({"reward": rewards}, prompt_ids=places, data_sources=sources)
    return {f"eval/{name}": value for name, value in figures.items()}
