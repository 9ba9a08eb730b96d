"""Decides what runs when: queues and one gate; a group's own life is in ``group_runner``.

Everything here runs on one event loop; :mod:`areal_lite.rollout.remote_inf_engine` serves other threads. Each submitted
group ends once, in ``_finish``, and its end is passed on once, by ``EndedGroups``.

Nothing polls. Whatever may let a group start (an end, a new version, a resume, a dumper that caught up) calls
``_pump``, which starts groups until the gate refuses; an event that did not call it would leave the engine waiting.

One queue for all would deadlock: a trainer that evaluates before it raises the version waits for groups that stand
behind training groups, which wait for that version. So evaluation and ``rollout_batch``, which the staleness bound
does not concern, have a queue of their own and go first; then submissions; then data sources, which always have more.

A ``wait`` without a time-out can still be left with nothing that will ever end: the bound admits none of the waiting
groups, and the caller that would raise the version is the one that waits. It gets a ``ConfigError`` then. If another
thread raises the version, the caller says so with a time-out.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from areal_lite.api.engine_api import InferenceEngine, Row
from areal_lite.api.episode_context import Episode
from areal_lite.api.trajectory import EpisodeStatus, Group, TaskId
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.errors import ConfigError
from areal_lite.rollout.episodes.admission_gate import AdmissionGate
from areal_lite.rollout.episodes.ended_groups import EndedGroups
from areal_lite.rollout.episodes.finished_groups import FinishedGroups
from areal_lite.rollout.episodes.group_runner import EpisodeRecipe, GroupRunner, Submission
from areal_lite.rollout.episodes.training_batches import TrainingBatches


class WorkflowExecutor:
    """Admits groups and delivers them; ``on_end`` and ``interrupt`` are as in EndedGroups and TrainingBatches."""

    def __init__(
        self,
        engine: InferenceEngine,
        config: InferenceEngineConfig,
        *,
        on_end: Callable[[Group], None],
        interrupt: Callable[[Sequence[Episode]], Awaitable[None]],
    ) -> None:
        self.gate = gate = AdmissionGate(
            max_concurrent=config.max_concurrent_rollouts,
            max_staleness=config.max_head_offpolicyness,
            batch_size=config.consumer_batch_size,
            extra=config.extra_groups,
        )
        self.ended = EndedGroups(on_end)
        self.runner = GroupRunner(engine, config.faults, on_end=self._finish)
        self.batches = TrainingBatches(
            config=config, gate=gate, runner=self.runner, ended=self.ended, interrupt=interrupt, start_more=self._pump
        )
        self.finished = FinishedGroups()  # groups for ``wait``
        self._waiting: deque[Submission] = deque()
        self._waiting_free: deque[Submission] = deque()
        self._outstanding = 0  # number of running or waiting submissions whose group is for ``wait``

    def submit(self, row: Row, recipe: EpisodeRecipe, group_size: int, task_id: TaskId | None = None) -> Submission:
        """Reserve a task id for a row whose group is for :meth:`wait`, from any thread; :meth:`enqueue` starts it."""
        return self.runner.make(
            row, recipe, group_size, deliver=self._deliver_to_wait, training=not recipe.context.is_eval, task_id=task_id
        )

    def enqueue(self, submission: Submission) -> None:
        self._outstanding += submission.deliver == self._deliver_to_wait
        (self._waiting if submission.training else self._waiting_free).append(submission)
        self._pump()

    async def wait(self, count: int, timeout_s: float | None) -> list[Group]:
        """Return the ``count`` submitted groups that finished first; after a time-out they stay for the next wait."""

        def enough() -> bool:
            return len(self.finished.groups) >= count

        def settled() -> bool:
            if enough() or timeout_s is not None:
                return enough()
            gate = self.gate  # nothing will end if nothing runs and the staleness bound admits none of those that wait
            may_start = gate.running or gate.paused or gate.held or gate.may_start_training()
            return bool(self._waiting) and not may_start

        submitted = len(self.finished.groups) + self._outstanding
        if count > submitted and timeout_s is None:
            raise ValueError(
                f"wait(count={count}) but only {submitted} submissions are left to wait for: submit more first"
            )
        if timeout_s is None and not enough() and not self.gate.running:
            self.gate.refuse_paused()
        try:
            async with asyncio.timeout(timeout_s):
                await self.finished.until(settled)
        except TimeoutError:
            raise TimeoutError(
                f"{len(self.finished.groups)} of {count} episodes ended within {timeout_s} s; {self.gate.describe()}. "
                "Nothing is lost: wait again"
            ) from None
        if not enough():
            raise ConfigError(
                f"wait(count={count}) would never return: {len(self.finished.groups)} of them ended and none is "
                f"running, because {self.gate.describe()}. If another thread does, give wait() a timeout"
            )
        return self.finished.take(count)

    async def rollout_batch(self, rows: Sequence[Row], recipe: EpisodeRecipe, group_size: int) -> list[Group]:
        """Run all rows at the current version and return their groups in order."""
        self.gate.refuse_paused()
        groups: dict[int, Group] = {}
        complete = asyncio.Event()

        def deliver(index: int, group: Group) -> None:
            groups[index] = group
            if len(groups) == len(rows):
                complete.set()

        made = list[Submission]()
        for index, row in enumerate(rows):
            done, name = partial(deliver, index), f"row {index}"
            made.append(self.runner.make(row, recipe, group_size, deliver=done, training=False, seed_name=name))
            self.enqueue(made[-1])
        try:
            if rows:
                await complete.wait()
        except asyncio.CancelledError:
            reason, own = "rollout_batch was cancelled", set(made)
            waiting, self._waiting_free = self._waiting_free, deque(s for s in self._waiting_free if s not in own)
            for submission in waiting:
                if submission in own:
                    self.runner.end_waiting(submission, reason)
            await self.runner.stop(made, reason)
            raise
        return [groups[index] for index in range(len(rows))]

    def set_version(self, version: int) -> None:
        if version < 0:
            raise ConfigError(f"the policy version is {version}: it starts at 0 and grows")
        self.gate.set_version(version)
        self.batches.version_changed()
        self._pump()

    def pause(self) -> None:
        """Start no more groups; running ones continue and are delivered."""
        self.gate.paused = True

    def resume(self) -> None:
        self.gate.paused = False
        self._pump()

    def hold(self, held: bool) -> None:
        self.gate.held = held
        self._pump()

    async def close(self) -> None:
        """Cancel everything that has not ended, allow it time to clean up, and deliver it as cancelled."""
        self.gate.paused = True
        reason = "the engine was closed"
        for queue in (self._waiting, self._waiting_free):
            while queue:
                self.runner.end_waiting(queue.popleft(), reason)
        await self.batches.set_all_aside(reason)
        await self.runner.close(reason)
        self.gate.paused = self.gate.held = False  # the engine may be initialized again

    def _pump(self) -> None:
        """Start what the gate allows: evaluation and rollout_batch first, then submissions, then the feed."""
        while self._waiting_free and self.gate.may_start():
            self._start(self._waiting_free.popleft())
        while self._waiting and self.gate.may_start_training():
            self._start(self._waiting.popleft())
        while (submission := self.batches.next_submission()) is not None:
            self._start(submission)

    def _start(self, submission: Submission) -> None:
        self.gate.start(training=submission.training)
        self.runner.start(submission, version=self.gate.version)

    def _finish(self, submission: Submission, group: Group) -> None:
        accepted = group.status is EpisodeStatus.ACCEPTED
        if submission.task is not None:
            self.gate.end(training=submission.training, accepted=accepted)
        if not (submission.samples and accepted):  # that is closed when its batch is cut
            self.ended.close(group)
        submission.deliver(group)
        self._pump()
        if not self.gate.running:
            self.finished.changed()  # a wait may have nothing left to wait for

    def _deliver_to_wait(self, group: Group) -> None:
        self._outstanding -= 1
        self.finished.put(group)
