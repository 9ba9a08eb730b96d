"""Decides what runs when: queues, admission, batches; a group's own life is in ``group_runner``.

Everything here runs on one event loop; :mod:`areal_lite.rollout.remote_inf_engine` serves other
threads. Guarantees that each group is counted and dumped once, when its end is final. Nothing polls: each
ended group, new version and resume asks the gate again and starts what may start.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from areal_lite.api.engine_api import InferenceEngine, Row
from areal_lite.api.episode_context import Episode
from areal_lite.api.failure import Failure
from areal_lite.api.scalars import Scalars
from areal_lite.api.shared_resources import SharedResources
from areal_lite.api.trajectory import EpisodeStatus, Group, TaskId
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.data.source.buffered_data_source import IterableDataSource
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.errors import ConfigError, EpisodeError
from areal_lite.rollout.episodes.admission_gate import AdmissionGate
from areal_lite.rollout.episodes.failure_tally import FailureTally
from areal_lite.rollout.episodes.finished_groups import ResultBox
from areal_lite.rollout.episodes.group_runner import GroupRunner
from areal_lite.rollout.episodes.partial_rollout import record_answers
from areal_lite.rollout.episodes.rollout_statistics import RolloutStatistics
from areal_lite.rollout.episodes.row_feed import STALE, RowFeed, cut_batch
from areal_lite.rollout.episodes.submission import EpisodeRecipe, Submission
from areal_lite.rollout.workers.worker_pool import Workers


class WorkflowExecutor:
    """Admits groups and delivers them.

    Args:
        engine: What workflows generate with.
        config: Bounds and deadlines.
        gate: Decides when the next group may start; shared with nobody.
        on_end: Called once with each final group; must not raise and must not block.
        interrupt: Ends the model calls of episodes that are about to be stopped, with what they have sampled.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        config: InferenceEngineConfig,
        *,
        gate: AdmissionGate,
        on_end: Callable[[Group], None],
        interrupt: Callable[[Sequence[Episode]], Awaitable[None]],
    ) -> None:
        self.config = config
        self.gate = gate
        self.counts: Counter[str] = Counter(dict.fromkeys(EpisodeStatus, 0))
        """Number of ended groups by status."""
        self.statistics = RolloutStatistics()
        self.failures = FailureTally()
        self.scalars = Scalars()
        """What the episodes of accepted groups recorded."""
        self._on_end = on_end
        self._interrupt = interrupt
        self._runner = GroupRunner(engine, timeout_s=config.faults.episode_timeout_s, on_end=self._finish)
        self._box = ResultBox()
        self._feeds: dict[int, tuple[RowFeed, EpisodeRecipe]] = {}
        """Feeds by the id of their source. The last one was used last, and it alone starts groups."""
        self._asking = asyncio.Lock()
        """Held while a batch is waited for."""
        self._waiting: deque[Submission] = deque()
        self._waiting_free: deque[Submission] = deque()
        self._unclaimed: set[TaskId] = set()
        """Groups of batches that never reached their caller; already counted and dumped."""
        self._outstanding = 0
        """Number of running or waiting submissions whose group is for ``wait``."""
        self._last_cut: float | None = None

    @property
    def abandoned(self) -> int:
        """Episodes that swallowed their cancellation and were left behind."""
        return self._runner.abandoned

    def deadline_of(self, task_id: TaskId) -> float | None:
        """Return when a running group must end, on the monotonic clock; from any thread."""
        return self._runner.deadline_of(task_id)

    @property
    def shared(self) -> SharedResources:
        """What all episodes share."""
        return self._runner.shared

    def run_in(self, workers: Workers) -> None:
        """Run the episodes of all groups in ``workers``."""
        self._runner.workers = workers

    def number_from(self, first: int) -> None:
        """Make ``first`` the smallest task id that is chosen from here on."""
        self._runner.number_from(first)

    # -- what callers ask for ------------------------------------------------------------------

    def submit(self, data: Row, recipe: EpisodeRecipe, task_id: TaskId | None = None) -> Submission:
        """Reserve a task id for one row whose group is for :meth:`wait`; any thread may call this.

        The group starts once :meth:`enqueue` was called with it on the loop.

        Raises:
            ConfigError: If ``task_id`` is in use or cannot name a file.
        """
        training = not recipe.is_eval
        return self._runner.make(data, recipe, self._deliver_to_wait, training=training, task_id=task_id)

    def enqueue(self, submission: Submission) -> None:
        """Start the submission as soon as the gate lets it."""
        self._outstanding += submission.deliver == self._deliver_to_wait
        (self._waiting if submission.training else self._waiting_free).append(submission)
        self._pump()

    async def wait(self, count: int, timeout_s: float | None) -> list[Group]:
        """Return the ``count`` submitted groups that finished first.

        Raises:
            ValueError: If fewer were submitted and there is no ``timeout_s``.
            ConfigError: If there is no ``timeout_s`` and the engine can start none of those that it would wait for.
            TimeoutError: After ``timeout_s``; the finished groups stay for the next wait.
        """

        def enough() -> bool:
            return len(self._box.groups) >= count

        def settled() -> bool:
            return enough() or (timeout_s is None and self._starts_nothing)

        there = len(self._box.groups) + self._outstanding
        if count > there and timeout_s is None:
            raise ValueError(
                f"wait(count={count}) but only {there} submissions are left to wait for: submit more first"
            )
        if timeout_s is None and not enough() and not self.gate.running:
            self._refuse_paused()
        try:
            async with asyncio.timeout(timeout_s):
                await self._box.until(settled)
        except TimeoutError:
            raise TimeoutError(
                f"{len(self._box.groups)} of {count} episodes ended within {timeout_s} s; {self.gate.describe()}. "
                "Nothing is lost: wait again"
            ) from None
        if not enough():
            raise ConfigError(
                f"wait(count={count}) would never return: {len(self._box.groups)} of them ended and none is running, "
                f"because {self.gate.describe()}. If another thread does, give wait() a timeout"
            )
        return self._box.take(count)

    @property
    def _starts_nothing(self) -> bool:
        """Whether submissions wait, nothing runs, and the staleness bound admits none of them."""
        gate = self.gate
        may_start = gate.running or gate.paused or gate.held or gate.may_start_training()
        return bool(self._waiting) and not may_start

    def wait_unclaimed(self, groups: list[Group]) -> None:
        """Put back the groups of a :meth:`wait` whose caller left before they arrived."""
        self._box.put_back(groups)

    async def rollout_batch(self, rows: Sequence[Row], recipe: EpisodeRecipe) -> list[Group]:
        """Run all rows at the current version and return their groups in order."""
        self._refuse_paused()
        groups: list[Group | None] = [None] * len(rows)
        left = len(rows)

        def deliver(index: int, group: Group) -> None:
            nonlocal left
            groups[index] = group
            left -= 1
            if left == 0:
                self._box.changed()

        for index, row in enumerate(rows):
            name = f"row {index}"
            self.enqueue(self._runner.make(row, recipe, partial(deliver, index), training=False, seed_name=name))
        await self._box.until(lambda: left == 0)
        return [group for group in groups if group is not None]

    async def prepare_batch(self, source: Iterable[Any], recipe: EpisodeRecipe) -> list[Group]:
        """Return exactly ``consumer_batch_size`` accepted groups within the staleness bound.

        From the first call on, groups of ``source`` are started whenever the gate is open, also between
        calls. A full batch waits for running groups that would be too old for later batches
        (``stale_groups: wait``); rows of groups that are too old anyway are drawn again. The batch returned before
        counts as trained. Callers take turns, and groups of another source go back to it, so that
        ``source`` has all places.

        Raises:
            StarvationError: If nothing was accepted for ``max_empty_batches`` batches.
            EpisodeError: If an episode failed under ``on_error: raise``.
            ConfigError: If the source ended with less than a batch, or its groups have another size.
        """
        self._refuse_paused()
        async with self._asking:
            feed = self._feed_of(source, recipe)
            feed.mark_trained()
            for other, _ in list(self._feeds.values()):
                if other is not feed and other.ahead:
                    await self._set_aside(other, "a batch of another source was requested")
            return await self._batch_of(feed)

    def batch_unclaimed(self, source: Iterable[Any], batch: list[Group]) -> None:
        """Put back a batch whose caller left before it arrived; the next call returns it."""
        if id(source) in self._feeds:
            feed, _ = self._feeds[id(source)]
            feed.take_back(batch)
            self.gate.cut = False
            self._unclaimed.update(group.task_id for group in batch)

    async def _batch_of(self, feed: RowFeed) -> list[Group]:
        count = self.config.consumer_batch_size
        max_misses = self.config.faults.max_empty_batches * count
        asked = time.monotonic()
        if self.config.max_head_offpolicyness:
            self.gate.cut = False
        while True:
            self._wait_for_oldest(feed)
            self._pump()
            await feed.box.until(feed.ready(count, max_misses))
            feed.check(count)
            batch = self._cut(feed, count)
            if not batch:
                continue
            self.gate.cut = True
            if self.config.max_head_offpolicyness == 0:
                try:
                    await self._set_aside(feed, "surplus: the batch was full")
                except asyncio.CancelledError:  # the caller is gone; the next call returns this batch
                    feed.box.put_back(batch)
                    self.gate.cut = False
                    raise
            feed.hand_over(batch)
            self.statistics.train([group for group in batch if group.task_id not in self._unclaimed])
            for group in batch:
                self._close(group)
            self._pace(feed, asked)
            self._pump()
            return batch

    def _cut(self, feed: RowFeed, count: int) -> list[Group]:
        """Return a batch of the feed, or an empty list if too many of its groups are stale."""
        cut = cut_batch(
            feed.box.groups,
            count,
            version=self.gate.version,
            max_staleness=self.config.max_head_offpolicyness,
            mask_off_policy=self.config.mask_offpolicy_in_partial_rollout or self._waits_for_oldest,
        )
        self.statistics.discard(cut.stale, masked_tokens=cut.masked_tokens)
        for group in cut.stale:
            group.end_as(EpisodeStatus.REJECTED, rejection=STALE)
            self.gate.give_back()
            feed.owe(group)
            self._close(group)
        return cut.fresh

    @property
    def _waits_for_oldest(self) -> bool:
        return self.config.stale_groups == "wait" and self.config.max_head_offpolicyness > 0

    def _wait_for_oldest(self, feed: RowFeed) -> None:
        """Have the batch wait for running groups that would be too old for a later one."""
        if not self._waits_for_oldest:
            return
        versions = {s.task_id: s.oldest_version() for s in self._running(feed)}
        known = {task_id: version for task_id, version in versions.items() if version is not None}
        feed.wait_for_oldest(known, self.gate.version - self.config.max_head_offpolicyness)

    def _pace(self, feed: RowFeed, asked: float) -> None:
        """Let the gate adapt how far groups run ahead."""
        now = time.monotonic()
        self.statistics.waited_for_oldest_s += feed.waited_for_oldest_s
        if self._last_cut is not None:
            self.gate.lead.batch_cut(
                step_s=now - self._last_cut,
                waited_s=now - asked,
                starved_s=now - asked - feed.waited_for_oldest_s,
                spare=len(feed.box.groups),
            )
        self._last_cut = now
        feed.waited_for_oldest_s = 0.0

    def _running(self, feed: RowFeed) -> list[Submission]:
        return [s for s in self._runner.live.values() if s.task is not None and s.feed is feed]

    def _feed_of(self, source: Iterable[Any], recipe: EpisodeRecipe) -> RowFeed:
        if id(source) in self._feeds:
            feed, _ = self._feeds[id(source)]
        else:
            size = recipe.group_size
            data_source = (
                source
                if isinstance(source, RolloutDataSource)
                else IterableDataSource(source, n_samples_per_prompt=size)
            )
            feed = RowFeed(data_source, retries=self.config.faults.failed_group_retries)
        if feed.source.n_samples_per_prompt != recipe.group_size:
            raise ConfigError(
                f"the data source gives groups of {feed.source.n_samples_per_prompt} and group_size is "
                f"{recipe.group_size}: make them equal"
            )
        self._feeds.pop(id(source), None)
        self._feeds[id(source)] = (feed, recipe)
        return feed

    async def close_source(self, source: Iterable[Any]) -> None:
        """Stop drawing from ``source`` and give back its groups that run or wait for a batch."""
        if id(source) in self._feeds:
            feed, _ = self._feeds.pop(id(source))
            await self._set_aside(feed, "the source was closed")
            feed.end(ConfigError("the source was closed while a batch was waited for"))

    async def _set_aside(self, feed: RowFeed, reason: str) -> None:
        """Stop the feed's running groups and give them and its finished ones back to the source, with their tokens."""
        if running := self._running(feed):
            try:
                await self._interrupt([episode for s in running for episode in s.episodes])
            finally:  # what was interrupted has to be stopped
                await self._runner.stop(running, reason)
        for group in feed.box.take(len(feed.box.groups)):
            feed.keep(group)
            group.end_as(EpisodeStatus.CANCELLED, failure=Failure.cancelled(reason))
            self.gate.give_back()
            self._close(group)

    def set_version(self, version: int) -> None:
        """Set the policy version and start the groups that it allows."""
        if version < 0:
            raise ConfigError(f"the policy version is {version}: it starts at 0 and grows")
        self.gate.set_version(version)
        if self._feeds:  # the oldest groups of a batch that is waited for have changed
            feed, _ = next(reversed(self._feeds.values()))
            self._wait_for_oldest(feed)
            feed.box.changed()
        self._pump()

    def pause(self) -> None:
        """Start no more groups; running ones continue and are delivered."""
        self.gate.paused = True

    def resume(self) -> None:
        """End :meth:`pause`."""
        self.gate.paused = False
        self._pump()

    def hold(self, held: bool) -> None:
        """Start no more groups while ``held``; running ones continue."""
        self.gate.held = held
        self._pump()

    async def close(self) -> None:
        """Cancel everything that has not ended, allow it time to clean up, and deliver it as cancelled."""
        self.gate.paused = True
        reason = "the engine was closed"
        for queue in (self._waiting, self._waiting_free):
            while queue:
                self._runner.end_waiting(queue.popleft(), reason)
        for feed, _ in list(self._feeds.values()):
            await self._set_aside(feed, reason)
        await self._runner.close(reason)
        self.gate.paused = False  # the engine may be initialized again

    # -- starting and ending -------------------------------------------------------------------

    def _refuse_paused(self) -> None:
        if self.gate.paused:
            raise ConfigError("the engine is paused, so no episode could start: call resume() first")

    def _pump(self) -> None:
        """Start what the gate allows: evaluation and rollout_batch first, then submissions, then the feed."""
        gate = self.gate
        while self._waiting_free and gate.may_start():
            self._start(self._waiting_free.popleft())
        while self._waiting and gate.may_start_training():
            self._start(self._waiting.popleft())
        if not self._feeds:
            return
        feed, recipe = next(reversed(self._feeds.values()))
        while gate.may_start_ahead(feed.ahead):
            if (samples := feed.next_group()) is None:
                return
            feed.running += 1
            submission = self._runner.make(
                feed.source.columns_of(samples[0].row),
                recipe,
                partial(self._deliver_to_feed, feed),
                training=True,
                seed_name=f"group {samples[0].group_index}, attempt {samples[0].attempts}",
                feed=feed,
                samples=samples,
            )
            record_answers(samples, submission.episodes, oldest_version=self._oldest_useful_version())
            if (oldest := submission.oldest_version()) is not None:
                feed.note_running(submission.task_id, oldest)
            self._start(submission)

    def _oldest_useful_version(self) -> int:
        """Return the oldest version whose tokens a stopped group may resume from."""
        if self.config.mask_offpolicy_in_partial_rollout or self._waits_for_oldest:
            return 0
        return self.gate.version - self.config.max_head_offpolicyness

    def _start(self, submission: Submission) -> None:
        self.gate.start(training=submission.training)
        self._runner.start(submission, version=self.gate.version)

    def _finish(self, submission: Submission, group: Group) -> None:
        """Count the ended group, deliver it, and start what may start in its place."""
        accepted = group.status is EpisodeStatus.ACCEPTED
        if submission.task is not None:
            self.gate.end(training=submission.training, accepted=accepted)
        if submission.feed is None or not accepted:
            self._close(group)
        submission.deliver(group)
        self._pump()
        if not self.gate.running:
            self._box.changed()  # a wait may have nothing left to wait for

    def _deliver_to_wait(self, group: Group) -> None:
        self._outstanding -= 1
        self._box.put(group)

    def _deliver_to_feed(self, feed: RowFeed, group: Group) -> None:
        feed.ended(group)
        if group.status is EpisodeStatus.CANCELLED:
            feed.keep(group)
            return
        self.statistics.group_ended(group)
        if group.status is EpisodeStatus.ACCEPTED:
            feed.accept(group)
            return
        if group.status is EpisodeStatus.FAILED and self.config.faults.on_error == "raise":
            feed.error = EpisodeError(
                f"episode {group.task_id} failed and rollout.faults.on_error is raise:\n{group.error}"
            )
        feed.miss(group)

    def _close(self, group: Group) -> None:
        """Count a final group and pass it to ``on_end``, once."""
        if group.task_id in self._unclaimed:
            self._unclaimed.remove(group.task_id)
            return
        self.counts[group.status] += 1
        self.failures.add(group)
        if group.status is EpisodeStatus.ACCEPTED:
            self.scalars.add(group)
        self._on_end(group)
