"""A group of episodes from submission to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from areal_lite.api.engine_api import Row, ShouldAcceptFn
from areal_lite.api.episode_context import Episode
from areal_lite.api.failure import Failure
from areal_lite.api.trajectory import EpisodeStatus, Group, TaskId
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.data.source.source_settings import SampleGroup
from areal_lite.processes.child_process import PickledObject
from areal_lite.rollout.episodes.row_feed import RowFeed


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecipe:
    """The workflow and filter to run on a row, resolved once and shared by many submissions."""

    workflow: RolloutWorkflow
    sent: PickledObject | None = None  # the workflow as worker processes get it; None without them
    should_accept_fn: ShouldAcceptFn | None = None
    is_eval: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Submission:
    """One row with its recipe; changed only by executor and group runner."""

    task_id: TaskId
    row: Row  # as it was submitted or drawn
    recipe: EpisodeRecipe
    deliver: Callable[[Group], None]
    training: bool  # True if its group waits for a training step, so that the staleness bound applies
    feed: RowFeed | None = None  # the feed it was drawn from, which decides when an accepted group trains
    samples: SampleGroup = field(default_factory=list)  # the group as it was drawn
    episodes: list[Episode]  # as many as its group has; see ``grouped_rollout.run_group``
    submitted: float
    data: Row | None = None  # the workflow's input, made of ``row`` when the group starts
    started: float = 0.0
    start_order: int = 0
    start_version: int = 0
    extended: bool = False
    """True if it got its time again, because another episode blocked the event loop at its deadline."""
    task: asyncio.Task[Group] | None = None
    stopped_by: Failure | None = None  # reason that the run cancelled it for; None otherwise

    def oldest_version(self) -> int | None:
        """Return a lower bound on the versions of its tokens; None before the first model call."""
        versions = [e.oldest_version for e in self.episodes if e.oldest_version is not None]
        return min(versions, default=None)

    def group(self, status: EpisodeStatus, failure: Failure | None = None, rejection: str | None = None) -> Group:
        """Return the ended group; episodes with data share its status, others keep their own."""
        trajectories = [episode.end(status, failure) for episode in self.episodes]
        if status in (EpisodeStatus.FAILED, EpisodeStatus.CANCELLED):  # trains nothing, whatever had finished
            for trajectory in trajectories:
                trajectory.sequences.clear()
        now = time.monotonic()
        started = self.started or now
        return Group(
            task_id=self.task_id,
            group_id=str(self.task_id),
            status=status,
            data=self.row if self.data is None else self.data,
            trajectories=trajectories,
            failure=failure,
            rejection=rejection,
            samples=self.samples,
            is_eval=self.recipe.is_eval,
            start_order=self.start_order,
            start_version=self.start_version,
            queued_s=started - self.submitted,
            run_s=now - started,
            finished_at=time.time(),
        )
