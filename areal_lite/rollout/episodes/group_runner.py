"""The life of one group of episodes: submitted, started, run, stopped in time, ended exactly once.

Knows nothing of queues, batches or staleness: :mod:`areal_lite.rollout.episodes.workflow_executor` decides what starts
and where a group goes when it ended. There is one task per group, owned here.

Three things may end a group at once: its task, its deadline, and a stop by the run. ``live`` decides: whoever removes
the group there ends it, and the others find it gone. A cancelled episode may swallow its cancellation (a bare
``except:`` around a model call) and run on. It cannot be killed, so after a grace it is ended as stopped and left
behind; its task may finish later, and finds the group gone.

An episode that cancels itself looks like one that was stopped. ``stopped_by`` tells them apart: it is set before each
cancel that comes from here, so without it the cancellation is the agent's own failure.
"""

import asyncio
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from areal_lite.api import episode_context
from areal_lite.api.engine_api import FilterDecision, InferenceEngine, Row, ShouldAcceptFn
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.failure import Failure, FailureKind, attributed_to
from areal_lite.api.shared_resources import SharedResources
from areal_lite.api.tensor_dict import tensor_dict_of
from areal_lite.api.trajectory import EpisodeStatus, Group, TaskId, TurnRewards
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.config.rollout_config import FaultsConfig
from areal_lite.data.packer.data_packer import UnpreparedRow
from areal_lite.data.source.sample import with_own_containers
from areal_lite.data.source.source_settings import SampleGroup
from areal_lite.errors import ConfigError
from areal_lite.processes.child_process import PickledObject
from areal_lite.processes.deadlines import Deadlines
from areal_lite.rollout.episodes.grouped_rollout import run_group
from areal_lite.rollout.workers.worker_pool import Workers

logger = logging.getLogger(__name__)
NO_RESULT, FILTERED = "the workflow returned None", "should_accept_fn said no"  # the filter's own reason follows
CANCEL_GRACE_S = 5.0  # seconds a cancelled episode may take to clean up before it is left behind
JUST_BLOCKED_S = 1.0  # seconds after the event loop was blocked in which a deadline is put off, once
_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecipe:
    """The workflow and filter to run on a row, resolved once and shared by many submissions."""

    workflow: RolloutWorkflow
    sent: PickledObject | None = None  # the workflow as worker processes get it; None without them
    should_accept_fn: ShouldAcceptFn | None = None
    context: EpisodeContext = EpisodeContext()  # what its episodes share wherever they run
    turn_rewards: TurnRewards = TurnRewards()


@dataclass(slots=True, eq=False, kw_only=True)
class Submission:
    """One row with its recipe; changed only by executor and group runner."""

    task_id: TaskId
    row: Row  # as it was submitted or drawn
    recipe: EpisodeRecipe
    deliver: Callable[[Group], None]
    training: bool  # True if its group waits for a training step, so that the staleness bound applies
    samples: SampleGroup = field(default_factory=list)  # the group as its data source handed it out; empty without one
    episodes: list[Episode]  # as many as its group has; see ``grouped_rollout.run_group``
    submitted: float
    data: Row | None = None  # the workflow's input, made of ``row`` when the group starts
    started: float = 0.0
    start_order: int = 0
    start_version: int = 0
    extended: bool = False  # got its time again: at its deadline, another episode blocked the event loop
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
            is_eval=self.recipe.context.is_eval,
            start_order=self.start_order,
            start_version=self.start_version,
            queued_s=started - self.submitted,
            run_s=now - started,
            finished_at=time.time(),
        )


class GroupRunner:
    """Runs submissions; each ends in exactly one call of ``on_end``, on the loop."""

    def __init__(
        self, engine: InferenceEngine, faults: FaultsConfig, *, on_end: Callable[[Submission, Group], None]
    ) -> None:
        self.abandoned = 0  # episodes that swallowed their cancellation and were left behind
        self.live: dict[TaskId, Submission] = {}  # submissions that have not ended, waiting or running
        self.workers: Workers | None = None  # where groups run, if not on this loop
        self._engine = engine
        self._timeout_s = faults.episode_timeout_s
        self._on_error = faults.on_error
        self._on_end = on_end
        self.shared = SharedResources()  # objects that all episodes share
        self._first_task_id = self._next_task_id = 0
        self._ids_lock = threading.Lock()
        self._start_orders = itertools.count()
        self._deadlines: Deadlines[Submission] = Deadlines(self._timeout_s, self._on_deadline)

    def number_from(self, first: int) -> None:
        """Choose task ids from ``first`` on; ids that are beyond it stay as they are."""
        with self._ids_lock:
            self._first_task_id = self._next_task_id = max(self._next_task_id, first)

    def make(
        self,
        row: Row,
        recipe: EpisodeRecipe,
        group_size: int,
        *,
        task_id: TaskId | None = None,
        seed_name: str | None = None,
        **fields: Any,
    ) -> Submission:
        """Return a new submission of ``group_size`` episodes with its own task id; any thread may call this.
        ``seed_name`` separates its seeds from those of other groups; ``fields`` are others of :class:`Submission`."""
        if group_size < 1:
            raise ConfigError(f"group_size is {group_size}: it must be 1 or more")
        with self._ids_lock:
            if task_id is None:
                task_id = self._next_task_id
                seed_name = seed_name or f"task {task_id - self._first_task_id}"
            elif isinstance(task_id, str) and not _TASK_ID.fullmatch(task_id):
                raise ConfigError(
                    f"task_id {task_id!r} names a file: use letters, digits, '.', '_' and '-', at most 100"
                )
            elif task_id in self.live:
                raise ConfigError(f"task_id {task_id!r} has not ended yet: use another, or None for a fresh one")
            if isinstance(task_id, int):
                self._next_task_id = max(self._next_task_id, task_id + 1)
            submission = self.live[task_id] = Submission(
                task_id=task_id,
                row=row,
                recipe=recipe,
                episodes=[Episode(member_idx=i, seed_name=seed_name or f"task {task_id}") for i in range(group_size)],
                submitted=time.monotonic(),
                **fields,
            )
        return submission

    def start(self, submission: Submission, *, version: int) -> None:
        submission.started = time.monotonic()
        submission.start_order = next(self._start_orders)
        submission.start_version = version
        submission.task = asyncio.get_running_loop().create_task(self._run(submission))
        submission.task.add_done_callback(lambda task: self._on_done(submission, task))
        self._deadlines.add(submission)

    def deadline_of(self, task_id: TaskId) -> float | None:
        """Return when a running group must end, on the monotonic clock; from any thread."""
        submission = self.live.get(task_id)
        return None if submission is None or not submission.started else submission.started + self._timeout_s

    async def stop(self, submissions: Iterable[Submission], reason: str) -> None:
        """Cancel running groups and wait until they have cleaned up, or the grace is over."""
        tasks = [s.task for s in submissions if s.task is not None]
        for submission in submissions:
            self._cancel(submission, Failure.cancelled(reason))
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)

    def end_waiting(self, submission: Submission, reason: str) -> None:
        self._end(submission, submission.group(EpisodeStatus.CANCELLED, Failure.cancelled(reason)))

    async def close(self, reason: str) -> None:
        """Stop all running groups; leave behind those that do not end in time."""
        await self.stop(list(self.live.values()), reason)
        for submission in list(self.live.values()):
            self._abandon(submission)
        self._deadlines.close()
        await self.shared.aclose()

    async def _run(self, submission: Submission) -> Group:
        recipe, episodes = submission.recipe, submission.episodes
        episode_context.enter(
            recipe.context._replace(
                task_id=submission.task_id,
                group_id=str(submission.task_id),
                version=submission.start_version,
                episodes=episodes,
                episode=episodes[0],
                shared=self.shared,
            )
        )
        try:
            with attributed_to(FailureKind.DATA):  # a packer is user code, so it runs here
                row = submission.row
                submission.data = data = row.prepared() if isinstance(row, UnpreparedRow) else row
            if self.workers is None:
                own = with_own_containers(dict(data))
                await run_group(recipe.workflow, self._engine, own, episodes, self._on_error)
            elif (
                failure := await self.workers.run(recipe.sent, data, submission.started + self._timeout_s)
            ) is not None:
                return submission.group(EpisodeStatus.FAILED, failure)
            return self._judge(submission)
        except asyncio.CancelledError:
            if submission.stopped_by is not None:
                raise
            failure = Failure(FailureKind.AGENT, "CancelledError", "the episode cancelled itself")
            return submission.group(EpisodeStatus.FAILED, failure)
        except BaseException as error:  # the one place where a group's error becomes data
            return submission.group(EpisodeStatus.FAILED, Failure.of(error))

    def _judge(self, submission: Submission) -> Group:
        trajectories = [episode.end(EpisodeStatus.REJECTED) for episode in submission.episodes]
        if not any(trajectory.sequences for trajectory in trajectories):
            failed = (t.failure for t in trajectories if t.status is EpisodeStatus.FAILED)
            if (failure := next(failed, None)) is not None:
                return submission.group(EpisodeStatus.FAILED, failure)
            return submission.group(EpisodeStatus.REJECTED, rejection=NO_RESULT)
        for trajectory in trajectories:
            trajectory.join_rewards(submission.recipe.turn_rewards)
        if (accepts := submission.recipe.should_accept_fn) is not None:
            by_sequence = [trajectory for trajectory in trajectories for _ in trajectory.sequences]
            columns = {**(tensor_dict_of(trajectories) or {}), "member_idx": [t.member_idx for t in by_sequence]}
            decision = accepts(columns | {"episode_rewards": [t.reward for t in by_sequence]})
            keep, reason = decision if isinstance(decision, FilterDecision) else (decision, "")
            if not keep:
                return submission.group(EpisodeStatus.REJECTED, rejection=f"{FILTERED}{reason and ': '}{reason}")
        return submission.group(EpisodeStatus.ACCEPTED)

    def _on_done(self, submission: Submission, task: asyncio.Task[Group]) -> None:
        if self.live.get(submission.task_id) is not submission:
            return  # it had been abandoned
        stopped = submission.stopped_by is not None
        if task.cancelled() or (stopped and task.result().status is EpisodeStatus.FAILED):
            self._end_stopped(submission)
        else:
            self._end(submission, task.result())

    def _on_deadline(self, submission: Submission) -> None:
        if not submission.extended and time.monotonic() - self.shared.blocked_at < JUST_BLOCKED_S:
            submission.extended = True  # the time was another's, who blocked the loop
            self._deadlines.add(submission)
            return
        message = f"the episode ran longer than episode_timeout_s={self._timeout_s:g}"
        self._cancel(submission, Failure(FailureKind.DEADLINE, "", message))

    def _cancel(self, submission: Submission, failure: Failure) -> None:
        if submission.stopped_by is None and submission.task is not None:
            submission.stopped_by = failure
            submission.task.cancel()
            asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._abandon, submission)

    def _abandon(self, submission: Submission) -> None:
        if self.live.get(submission.task_id) is submission:
            self.abandoned += 1
            logger.warning("episode %s swallowed its cancellation and is left behind", submission.task_id)
            self._end_stopped(submission)

    def _end_stopped(self, submission: Submission) -> None:
        failure = submission.stopped_by or Failure.cancelled("the task was cancelled")
        late = failure.kind is FailureKind.DEADLINE
        self._end(submission, submission.group(EpisodeStatus.FAILED if late else EpisodeStatus.CANCELLED, failure))

    def _end(self, submission: Submission, group: Group) -> None:
        self._deadlines.discard(submission)
        del self.live[submission.task_id]
        self._on_end(submission, group)
