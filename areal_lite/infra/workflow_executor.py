"""Runs episodes on one event loop and guarantees that each ends exactly once.

Everything here runs on the loop; :mod:`areal_lite.infra.remote_inf_engine` is the door for other
threads. There is one task per group of episodes, owned by the executor; ending costs O(1). Nothing
polls: each end, each new version, each resume asks the gate again and starts what may start.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from areal_lite.api import episode_context
from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.engine_api import FilterDecision, InferenceEngine, Row
from areal_lite.api.episode import EpisodeResult, EpisodeStatus, MemberRecord, TaskId
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.api.tensor_dict import check_outcome, trajectory_tensors
from areal_lite.data.source.iterable_data_source import IterableDataSource
from areal_lite.data.source.rollout_data_source import Group, RolloutDataSource
from areal_lite.data.source.sample import with_own_containers
from areal_lite.errors import ConfigError, EpisodeError
from areal_lite.infra.admission_gate import AdmissionGate
from areal_lite.infra.deadlines import Deadlines
from areal_lite.infra.grouped_rollout import error_text
from areal_lite.infra.partial_rollout import record_answers
from areal_lite.infra.result_box import ResultBox
from areal_lite.infra.row_feed import STALE, RowFeed, cut_batch
from areal_lite.infra.submission import EpisodeRecipe, Submission
from areal_lite.infra.workflow_context import SharedHttp

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 5.0
"""Seconds a cancelled episode may take to clean up before it is left behind."""

_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class WorkflowExecutor:
    """Admits, runs and ends episodes.

    Args:
        engine: What workflows generate with.
        config: Bounds and deadlines.
        gate: Decides when the next group may start; shared with nobody.
        on_end: Called once with each final result; must not raise and must not block.
        interrupt: Ends the model calls of episodes that are about to be stopped, with what they have sampled.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        config: InferenceEngineConfig,
        *,
        gate: AdmissionGate,
        on_end: Callable[[EpisodeResult], None],
        interrupt: Callable[[Sequence[MemberRecord]], Awaitable[None]],
    ) -> None:
        self.config = config
        self.gate = gate
        self.counts: Counter[str] = Counter(dict.fromkeys(EpisodeStatus, 0))
        """Ended groups by status, over the whole life."""
        self.abandoned = 0
        """Episodes that swallowed their cancellation and were left behind."""
        self._engine = engine
        self._on_end = on_end
        self._interrupt = interrupt
        self._http = SharedHttp()
        self._box = ResultBox()
        self._feeds: dict[int, tuple[RowFeed, EpisodeRecipe]] = {}
        """By the id of their source. The one that was asked last is last, and it alone starts groups."""
        self._asking = asyncio.Lock()
        """Held while a batch is waited for."""
        self._waiting: deque[Submission] = deque()
        self._waiting_free: deque[Submission] = deque()
        self._unclaimed: set[TaskId] = set()
        """Results of a batch that nobody got, which were counted and shown when it was cut."""
        self._live: dict[TaskId, Submission] = {}
        """All that has not ended, waiting or running."""
        self._next_task_id = 0
        self._ids_lock = threading.Lock()
        self._deadlines: Deadlines[Submission] = Deadlines(config.episode_timeout_s, self._on_deadline)
        self._start_orders = itertools.count()
        self._outstanding = 0
        """Submissions whose result goes to ``wait`` and has not ended."""

    # -- what callers ask for ------------------------------------------------------------------

    def submit(self, data: Row, recipe: EpisodeRecipe, task_id: TaskId | None = None) -> Submission:
        """Reserve a task id for one row whose result is for :meth:`wait`; any thread may call this.

        The episode starts once :meth:`enqueue` was called with it on the loop.

        Raises:
            ConfigError: If ``task_id`` is in use or cannot name a file.
        """
        return self._make(data, recipe, self._deliver_to_wait, training=not recipe.is_eval, task_id=task_id)

    def enqueue(self, submission: Submission) -> None:
        """Start the submission as soon as the gate lets it."""
        self._outstanding += submission.deliver == self._deliver_to_wait
        (self._waiting if submission.training else self._waiting_free).append(submission)
        self._pump()

    async def wait(self, count: int, timeout_s: float | None) -> list[EpisodeResult]:
        """Return the ``count`` submitted results that finished first.

        Raises:
            ValueError: If fewer were submitted and there is no ``timeout_s``.
            TimeoutError: After ``timeout_s``; the finished results stay for the next wait.
        """
        there = len(self._box.results) + self._outstanding
        if count > there and timeout_s is None:
            raise ValueError(
                f"wait(count={count}) but only {there} submissions are left to wait for: submit more first"
            )
        try:
            async with asyncio.timeout(timeout_s):
                await self._box.until(lambda: len(self._box.results) >= count)
        except TimeoutError:
            raise TimeoutError(
                f"{len(self._box.results)} of {count} episodes ended within {timeout_s} s; {self.gate.describe()}. "
                "Nothing is lost: wait again"
            ) from None
        return self._box.take(count)

    def wait_unclaimed(self, results: list[EpisodeResult]) -> None:
        """Put the results of a :meth:`wait` back whose caller left before they arrived."""
        self._box.put_back(results)

    async def rollout_batch(self, rows: Sequence[Row], recipe: EpisodeRecipe) -> list[EpisodeResult]:
        """Run all rows at the current version and return their results in the order of the rows."""
        self._refuse_paused()
        results: list[EpisodeResult | None] = [None] * len(rows)
        left = len(rows)
        done = asyncio.get_running_loop().create_future()

        def deliver(index: int, result: EpisodeResult) -> None:
            nonlocal left
            results[index] = result
            left -= 1
            if left == 0 and not done.done():
                done.set_result(None)

        for index, row in enumerate(rows):
            name = f"row {index}"
            self.enqueue(self._make(row, recipe, partial(deliver, index), training=False, seed_name=name))
        if rows:
            await done
        return [result for result in results if result is not None]

    async def prepare_batch(self, source: Iterable[Any], recipe: EpisodeRecipe) -> list[EpisodeResult]:
        """Return exactly ``consumer_batch_size`` accepted results within the staleness bound.

        From the first call on, groups of ``source`` are started whenever the gate is open, also between
        calls. Those that grew too old are drawn again; the batch returned before counts as trained. Callers
        take turns, and what another source has ahead goes back to it, so that ``source`` has all places.

        Raises:
            StarvationError: If nothing was accepted for ``max_empty_batches`` batches.
            EpisodeError: If an episode failed under ``on_error: raise``.
            ConfigError: If the source ended with less than a batch, or its groups have another size.
        """
        self._refuse_paused()
        async with self._asking:
            feed = self._feed_of(source, recipe)
            feed.settle()
            for other, _ in list(self._feeds.values()):
                if other is not feed and other.ahead:
                    await self._set_aside(other, "a batch of another source was asked for")
            return await self._batch_of(feed)

    def batch_unclaimed(self, source: Iterable[Any], batch: list[EpisodeResult]) -> None:
        """Put a batch back whose caller left before it arrived: the next one who asks gets it."""
        if id(source) in self._feeds:
            feed, _ = self._feeds[id(source)]
            feed.take_back(batch)
            self._unclaimed.update(result.task_id for result in batch)

    async def _batch_of(self, feed: RowFeed) -> list[EpisodeResult]:
        count = self.config.consumer_batch_size
        max_misses = self.config.max_empty_batches * count
        while True:
            self._pump()
            await feed.box.until(feed.ready(count, max_misses))
            feed.check(count)
            cut = cut_batch(
                feed.box.results,
                count,
                version=self.gate.version,
                max_staleness=self.config.max_head_offpolicyness,
                mask_off_policy=self.config.mask_offpolicy_in_partial_rollout,
            )
            for result in cut.stale:
                result.status, result.error = EpisodeStatus.REJECTED, STALE
                self.gate.give_back()
                feed.owe(result)
                self._close(result)
            if cut.fresh:
                self.gate.cut = True
                if self.config.max_head_offpolicyness == 0:
                    try:
                        await self._set_aside(feed, "surplus: the batch was full")
                    except asyncio.CancelledError:  # nobody gets this batch: it waits for who asks next
                        feed.box.put_back(cut.fresh)
                        self.gate.cut = False
                        raise
                feed.hand_over(cut.fresh)
                for result in cut.fresh:
                    self._close(result)
                self._pump()
                return cut.fresh

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
            feed = RowFeed(data_source, retries=self.config.failed_group_retries)
        if feed.source.n_samples_per_prompt != recipe.group_size:
            raise ConfigError(
                f"the data source gives groups of {feed.source.n_samples_per_prompt} and group_size is "
                f"{recipe.group_size}: make them equal"
            )
        self._feeds.pop(id(source), None)
        self._feeds[id(source)] = (feed, recipe)
        return feed

    async def close_source(self, source: Iterable[Any]) -> None:
        """Draw no more of ``source``, and give back to it what is running or waits for a batch."""
        if id(source) in self._feeds:
            feed, _ = self._feeds.pop(id(source))
            await self._set_aside(feed, "the source was closed")
            feed.end(ConfigError("the source was closed while a batch was waited for"))

    async def _set_aside(self, feed: RowFeed, reason: str) -> None:
        """Stop what runs of the feed and return it with what waits for a batch, tokens and all."""
        running = [s for s in self._live.values() if s.task is not None and s.feed is feed]
        if running:
            try:
                await self._interrupt([member for s in running for member in s.members])
            finally:  # what was interrupted has to be stopped
                for submission in running:
                    self._stop(submission, reason)
            await asyncio.wait([s.task for s in running if s.task], timeout=CANCEL_GRACE_S)
        for result in feed.box.take(len(feed.box.results)):
            feed.keep(result)
            result.status, result.error = EpisodeStatus.CANCELLED, reason
            self.gate.give_back()
            self._close(result)

    def set_version(self, version: int) -> None:
        """Take a new policy version and start what it lets start."""
        if version < 0:
            raise ConfigError(f"the policy version is {version}: it starts at 0 and grows")
        self.gate.set_version(version)
        self._pump()

    def pause(self) -> None:
        """Start nothing more; what runs goes on and is delivered."""
        self.gate.paused = True

    def resume(self) -> None:
        """End :meth:`pause`."""
        self.gate.paused = False
        self._pump()

    async def close(self) -> None:
        """Cancel all that has not ended, give it a grace to clean up, and deliver it as cancelled."""
        self.gate.paused = True
        reason = "the engine was closed"
        for queue in (self._waiting, self._waiting_free):
            while queue:
                self._end(queue.popleft(), EpisodeStatus.CANCELLED, error=reason)
        for feed, _ in list(self._feeds.values()):
            await self._set_aside(feed, reason)
        for submission in list(self._live.values()):
            self._stop(submission, reason)
        if tasks := [s.task for s in self._live.values() if s.task is not None]:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)
        for submission in list(self._live.values()):
            self._abandon(submission)
        self._deadlines.close()
        await self._http.close()

    # -- one submission, from start to end -----------------------------------------------------

    def _make(
        self,
        data: Row,
        recipe: EpisodeRecipe,
        deliver: Callable[[EpisodeResult], None],
        *,
        training: bool,
        feed: RowFeed | None = None,
        samples: Group | None = None,
        task_id: TaskId | None = None,
        seed_name: str | None = None,
    ) -> Submission:
        with self._ids_lock:
            if task_id is None:
                task_id = self._next_task_id
            elif isinstance(task_id, str) and not _TASK_ID.fullmatch(task_id):
                raise ConfigError(
                    f"task_id {task_id!r} names a file: use letters, digits, '.', '_' and '-', at most 100"
                )
            elif task_id in self._live:
                raise ConfigError(
                    f"task_id {task_id!r} has not ended yet: use another, or None for a fresh one"
                )
            if isinstance(task_id, int):
                self._next_task_id = max(self._next_task_id, task_id + 1)
            submission = self._live[task_id] = Submission(
                task_id=task_id,
                data=data,
                recipe=recipe,
                deliver=deliver,
                training=training,
                feed=feed,
                samples=samples or [],
                members=[
                    MemberRecord(sample_idx=i, seed_name=seed_name or f"task {task_id}")
                    for i in range(recipe.group_size)
                ],
                submitted=time.monotonic(),
            )
        return submission

    def _refuse_paused(self) -> None:
        if self.gate.paused:
            raise ConfigError("the engine is paused, so no episode could start: call resume() first")

    def _pump(self) -> None:
        """Start whatever the gate lets start: evaluation and batches first, then training, then feeds."""
        gate = self.gate
        while self._waiting_free and gate.may_start():
            self._start(self._waiting_free.popleft())
        while self._waiting and gate.may_start_training():
            self._start(self._waiting.popleft())
        if not self._feeds:
            return
        feed, recipe = next(reversed(self._feeds.values()))
        # No more ahead than can be trained in time, also when versions passed without a batch.
        ahead = (gate.max_staleness + 1) * gate.batch_size + gate.extra
        while feed.ahead < ahead and gate.may_start_training() and (group := feed.next_group()) is not None:
            feed.running += 1
            deliver = partial(self._deliver_to_feed, feed)
            name = f"group {group[0].group_index}, attempt {group[0].attempts}"
            submission = self._make(
                group[0].row, recipe, deliver, training=True, feed=feed, samples=group, seed_name=name
            )
            record_answers(group, submission.members, oldest_version=self._oldest_useful_version())
            self._start(submission)

    def _oldest_useful_version(self) -> int:
        """Return the version from which on a stopped group's tokens are of use."""
        if self.config.mask_offpolicy_in_partial_rollout:
            return 0
        return self.gate.version - self.config.max_head_offpolicyness

    def _start(self, submission: Submission) -> None:
        loop = asyncio.get_running_loop()
        self.gate.start(training=submission.training)
        submission.started = time.monotonic()
        submission.start_order = next(self._start_orders)
        submission.start_version = self.gate.version
        submission.task = loop.create_task(self._run(submission))
        submission.task.add_done_callback(lambda task: self._on_done(submission, task))
        self._deadlines.add(submission)

    async def _run(self, submission: Submission) -> EpisodeResult:
        recipe, members = submission.recipe, submission.members
        episode_context.enter(
            EpisodeContext(
                is_eval=recipe.is_eval,
                task_id=submission.task_id,
                group_id=str(submission.task_id),
                version=submission.start_version,
                members=members,
                member=members[0],
                http=self._http,
            )
        )
        try:
            if submission.feed is not None:  # a packer is user code, so it runs here
                submission.data = submission.feed.source.rollout_input(submission.samples)
            data = with_own_containers(dict(submission.data))
            outcome = await recipe.workflow.arun_episode(self._engine, data)
            num_rows = check_outcome(outcome)
            if len(members) == 1:
                members[0].num_rows = num_rows
            if outcome is None:
                # A group that was dropped for a member's error is a failure, not a refusal.
                error = next((m.error for m in members if m.status is EpisodeStatus.FAILED), None)
                status = EpisodeStatus.FAILED if error else EpisodeStatus.REJECTED
                return submission.result(status, error=error or "the workflow returned None")
            tensors = trajectory_tensors(outcome)
            if recipe.should_accept_fn is not None:
                decision = recipe.should_accept_fn(tensors)
                keep, reason = decision if isinstance(decision, FilterDecision) else (decision, "")
                if not keep:
                    error = f"should_accept_fn said no{reason and ': '}{reason}"
                    return submission.result(EpisodeStatus.REJECTED, tensors, error)
            return submission.result(EpisodeStatus.ACCEPTED, tensors)
        except asyncio.CancelledError:
            if submission.stopped_by is not None:
                raise
            return submission.result(EpisodeStatus.FAILED, error="the episode cancelled itself")
        except BaseException as error:  # the one place where an episode's error becomes data
            return submission.result(EpisodeStatus.FAILED, error=error_text(error))

    def _on_done(self, submission: Submission, task: asyncio.Task[EpisodeResult]) -> None:
        if self._live.get(submission.task_id) is not submission:
            return  # it had been abandoned
        if task.cancelled():
            self._end_stopped(submission)
        else:
            result = task.result()
            if submission.stopped_by is not None and result.status is EpisodeStatus.FAILED:
                self._end_stopped(submission)
            else:
                self._finish(submission, result)

    def _on_deadline(self, submission: Submission) -> None:
        self._stop(
            submission, f"the episode ran longer than episode_timeout_s={self.config.episode_timeout_s:g}"
        )

    def _stop(self, submission: Submission, reason: str) -> None:
        if submission.stopped_by is None and submission.task is not None:
            submission.stopped_by = reason
            submission.task.cancel()
            asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._abandon, submission)

    def _abandon(self, submission: Submission) -> None:
        if self._live.get(submission.task_id) is submission:
            self.abandoned += 1
            logger.warning("episode %s swallowed its cancellation and is left behind", submission.task_id)
            self._end_stopped(submission)

    def _end_stopped(self, submission: Submission) -> None:
        reason = submission.stopped_by or "the task was cancelled"
        late = "episode_timeout_s" in reason
        self._end(submission, EpisodeStatus.FAILED if late else EpisodeStatus.CANCELLED, error=reason)

    def _end(self, submission: Submission, status: EpisodeStatus, *, error: str) -> None:
        self._finish(submission, submission.result(status, error=error))

    def _finish(self, submission: Submission, result: EpisodeResult) -> None:
        """The one end: counters, delivery, and whatever may start in the freed place."""
        self._deadlines.discard(submission)
        del self._live[submission.task_id]
        accepted = result.status is EpisodeStatus.ACCEPTED
        if submission.task is not None:
            self.gate.end(training=submission.training, accepted=accepted)
        for member in result.members:
            if member.status is None:
                member.status = result.status
                member.error = result.error
        if submission.feed is None or not accepted:
            self._close(result)
        submission.deliver(result)
        self._pump()

    def _deliver_to_wait(self, result: EpisodeResult) -> None:
        self._outstanding -= 1
        self._box.put(result)

    def _deliver_to_feed(self, feed: RowFeed, result: EpisodeResult) -> None:
        feed.running -= 1
        if result.status is EpisodeStatus.ACCEPTED:
            feed.accept(result)
            return
        if result.status is EpisodeStatus.CANCELLED:
            feed.keep(result)
            return
        if result.status is EpisodeStatus.FAILED and self.config.on_error == "raise":
            feed.error = EpisodeError(
                f"episode {result.task_id} failed and rollout.on_error is raise:\n{result.error}"
            )
        feed.miss(result)

    def _close(self, result: EpisodeResult) -> None:
        """The result is final: count it and let observers see it, once."""
        if result.task_id in self._unclaimed:
            self._unclaimed.remove(result.task_id)
            return
        self.counts[result.status] += 1
        self._on_end(result)
