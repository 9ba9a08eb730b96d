"""A group of episodes on its way to its one end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areal_lite.api.engine_api import Row, ShouldAcceptFn
from areal_lite.api.episode import EpisodeResult, EpisodeStatus, MemberRecord, TaskId
from areal_lite.api.tensor_dict import trained_version_range
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.data.source.rollout_data_source import Group
from areal_lite.infra.row_feed import RowFeed


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecipe:
    """What to run on a row, resolved once and shared by many submissions."""

    workflow: RolloutWorkflow
    should_accept_fn: ShouldAcceptFn | None = None
    group_size: int = 1
    is_eval: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Submission:
    """One row with its recipe; the executor alone changes it."""

    task_id: TaskId
    data: Row
    recipe: EpisodeRecipe
    deliver: Callable[[EpisodeResult], None]
    training: bool
    """Whether the staleness bound holds it back: its result waits for a training step."""
    feed: RowFeed | None = None
    """Where it was drawn from; the cut of a batch then decides over an accepted result."""
    samples: Group = field(default_factory=list)
    """The group as it was drawn."""
    members: list[MemberRecord]
    submitted: float
    started: float = 0.0
    start_order: int = 0
    start_version: int = 0
    task: asyncio.Task[EpisodeResult] | None = None
    stopped_by: str | None = None
    """Why we cancelled it; None while we did not."""

    def result(
        self,
        status: EpisodeStatus,
        tensors: dict[str, Any] | None = None,
        error: str | None = None,
    ) -> EpisodeResult:
        """Return the end of this group of episodes."""
        versions = trained_version_range(tensors) if tensors is not None else None
        now = time.monotonic()
        started = self.started or now
        return EpisodeResult(
            task_id=self.task_id,
            group_id=str(self.task_id),
            status=status,
            data=self.data,
            samples=self.samples,
            trajectory=tensors,
            error=error,
            is_eval=self.recipe.is_eval,
            start_order=self.start_order,
            start_version=self.start_version,
            head_version=versions[0] if versions else None,
            tail_version=versions[1] if versions else None,
            members=self.members,
            queued_s=started - self.submitted,
            run_s=now - started,
            finished_at=time.time(),
        )
