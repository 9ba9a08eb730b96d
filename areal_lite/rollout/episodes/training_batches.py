"""Training batches of data sources: draws their groups ahead of need, cuts batches, gives back what does not train.

Each source has a :class:`RowFeed`; the one used last starts groups, whenever the gate is open, also between calls.
Three rules keep a source's rows from being lost or trained twice:

- A batch counts as trained when the next one is requested, not when it is returned. A trainer that stops between the
  two has its rows drawn again after a restart; marking at the return would lose them.
- A caller may leave while its batch is on the way (Ctrl-C, a time-out). The batch is then put back, and the next call
  returns it. Its groups were counted and dumped already, so ``EndedGroups`` does not count them again.
- Only one caller waits at a time. Two that wait for one feed would each see a complete batch when the last group of
  one batch ends, and the second would cut too few.

On-policy (a bound of 0), a batch ends its whole generation: groups that still run would be too old for the next one,
so they are stopped before the batch is returned, and their tokens go back to the source. The caller may leave in that
wait, too; the batch is put back before the cancellation passes on. A group that swallows its cancellation is left
behind by the runner after its grace and counts as cancelled.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from areal_lite.api.episode_context import Episode
from areal_lite.api.failure import Failure
from areal_lite.api.trajectory import EpisodeStatus, Group
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.data.source.row_streams import IterableRows
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError, EpisodeError
from areal_lite.rollout.episodes.admission_gate import AdmissionGate
from areal_lite.rollout.episodes.batch_cut import STALE, cut_batch
from areal_lite.rollout.episodes.ended_groups import EndedGroups
from areal_lite.rollout.episodes.group_runner import EpisodeRecipe, GroupRunner, Submission
from areal_lite.rollout.episodes.partial_rollout import record_answers
from areal_lite.rollout.episodes.row_feed import RowFeed

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class TrainingBatches:
    """Batches of accepted groups; lives on the event loop."""

    config: InferenceEngineConfig
    gate: AdmissionGate
    runner: GroupRunner
    ended: EndedGroups
    interrupt: Callable[[Sequence[Episode]], Awaitable[None]]  # ends model calls, with what they have sampled
    start_more: Callable[[], None]  # asks the executor to start what the gate allows

    def __post_init__(self) -> None:
        self._waits_for_oldest = self.config.stale_groups == "wait" and self.config.max_head_offpolicyness > 0
        self._masks_older = self.config.mask_offpolicy_in_partial_rollout or self._waits_for_oldest
        """A group trains without its tokens that are too old, so it may resume from any."""
        self._feeds: dict[int, tuple[RowFeed, EpisodeRecipe]] = {}  # by the source's id; the last used starts groups
        self._asking = asyncio.Lock()  # held while a batch is waited for
        self._last_cut: float | None = None

    async def prepare(self, source: Iterable[Any], recipe: EpisodeRecipe, group_size: int | None) -> list[Group]:
        """Return exactly ``consumer_batch_size`` accepted groups within the staleness bound. A data source decides the
        size of its groups; ``group_size`` is that of plain rows, and may repeat the source's. Rows of groups that are
        too old are drawn again. Groups of another source go back to it, as they count at the gate."""
        self.gate.refuse_paused()
        async with self._asking:
            feed = self._feed_of(source, recipe, group_size)
            feed.mark_trained()
            for other, _ in list(self._feeds.values()):
                if other is not feed and other.ahead:
                    await self._set_aside(other, "a batch of another source was requested")
            return await self._batch_of(feed)

    def unclaimed(self, batch: list[Group]) -> None:
        """Put back a batch whose caller left before it arrived; the next call returns it."""
        if any(feed.take_back(batch) for feed, _ in self._feeds.values()):
            self.gate.cut = False
            self.ended.unclaimed.update(group.task_id for group in batch)

    async def _batch_of(self, feed: RowFeed) -> list[Group]:
        count = self.config.consumer_batch_size
        max_misses = self.config.faults.max_empty_batches * count
        asked = time.monotonic()
        if self.config.max_head_offpolicyness:
            self.gate.cut = False
        while True:
            self._wait_for_oldest(feed)
            self.start_more()
            ready = feed.ready(count, max_misses)
            if not (self.gate.running or ready()):
                logger.warning("prepare_batch waits, and nothing runs: %s", self.gate.describe())
            await feed.finished.until(ready)
            feed.check(count)
            batch = self._cut(feed, count)
            if not batch:
                continue
            self.gate.cut = True
            if self.config.max_head_offpolicyness == 0:
                try:
                    await self._set_aside(feed, "surplus: the batch was full")
                except asyncio.CancelledError:  # the caller is gone; the next call returns this batch
                    feed.finished.put_back(batch)
                    self.gate.cut = False
                    raise
            feed.hand_over(batch)
            self.ended.close_batch(batch)
            self._note_pace(feed, asked)
            self.start_more()
            return batch

    def _cut(self, feed: RowFeed, count: int) -> list[Group]:
        cut = cut_batch(
            feed.finished.groups,
            count,
            version=self.gate.version,
            max_staleness=self.config.max_head_offpolicyness,
            mask_off_policy=self._masks_older,
        )
        self.ended.statistics.discard(cut.stale, masked_tokens=cut.masked_tokens)
        for group in cut.stale:
            group.end_as(EpisodeStatus.REJECTED, rejection=STALE)
            self.gate.give_back()
            feed.owe(group)
            self.ended.close(group)
        return cut.fresh

    def _wait_for_oldest(self, feed: RowFeed) -> None:
        """Have the batch wait for running groups that would be too old for a later one."""
        if not self._waits_for_oldest:
            return
        running = feed.running.items()
        versions = {task_id: oldest for task_id, s in running if (oldest := s.oldest_version()) is not None}
        feed.wait_for_oldest(versions, self.gate.version - self.config.max_head_offpolicyness)

    def _note_pace(self, feed: RowFeed, asked: float) -> None:
        now = time.monotonic()
        self.ended.statistics.waited_for_oldest_s += feed.waited_for_oldest_s
        if self._last_cut is not None:
            self.gate.lookahead.batch_cut(
                step_s=now - self._last_cut,
                waited_s=now - asked,
                starved_s=now - asked - feed.waited_for_oldest_s,
                spare=len(feed.finished.groups),
            )
        self._last_cut = now
        feed.waited_for_oldest_s = 0.0

    def _feed_of(self, source: Iterable[Any], recipe: EpisodeRecipe, group_size: int | None) -> RowFeed:
        if id(source) in self._feeds:
            feed, _ = self._feeds[id(source)]
        else:
            if not isinstance(data_source := source, RolloutDataSource):
                size = self.config.group_size if group_size is None else group_size
                settings = SourceSettings(n_samples_per_prompt=size)
                data_source = RolloutDataSourceWithBuffer(IterableRows(source, settings))
            feed = RowFeed(data_source, retries=self.config.faults.failed_group_retries)
        if group_size not in (None, drawn := feed.source.settings.n_samples_per_prompt):
            raise ConfigError(
                f"the data source gives groups of {drawn} and group_size is {group_size}: make them equal"
            )
        self._feeds.pop(id(source), None)
        self._feeds[id(source)] = (feed, recipe)
        return feed

    def next_submission(self) -> Submission | None:
        """Return the next group to start; None if the gate lets none start ahead, or the rows have ended."""
        if not self._feeds:
            return None
        feed, recipe = next(reversed(self._feeds.values()))
        if not self.gate.may_start_ahead(feed.ahead) or (samples := feed.next_group()) is None:
            return None
        submission = self.runner.make(
            feed.source.unprepared_input(samples),
            recipe,
            feed.source.settings.n_samples_per_prompt,
            deliver=partial(self._deliver, feed),
            training=True,
            seed_name=f"group {samples[0].group_index}, attempt {samples[0].attempts}",
            samples=samples,
        )
        feed.running[submission.task_id] = submission
        oldest_useful = 0 if self._masks_older else self.gate.version - self.config.max_head_offpolicyness
        record_answers(samples, submission.episodes, oldest_version=oldest_useful)
        if (oldest := submission.oldest_version()) is not None:
            feed.oldest_groups.add_running(submission.task_id, oldest)
        return submission

    def _deliver(self, feed: RowFeed, group: Group) -> None:
        feed.ended(group)
        if group.status is EpisodeStatus.CANCELLED:
            feed.keep(group)
            return
        self.ended.statistics.group_ended(group)
        if group.status is EpisodeStatus.ACCEPTED:
            feed.accept(group)
            return
        if group.status is EpisodeStatus.FAILED and self.config.faults.on_error == "raise":
            feed.error = EpisodeError(
                f"episode {group.task_id} failed and rollout.faults.on_error is raise:\n{group.error}"
            )
        feed.miss(group)

    def version_changed(self) -> None:
        """Look again which groups a batch that is waited for has to wait for: its oldest ones have changed."""
        if self._feeds:
            feed, _ = next(reversed(self._feeds.values()))
            self._wait_for_oldest(feed)
            feed.finished.changed()

    async def close_source(self, source: Iterable[Any]) -> None:
        """Stop drawing from ``source`` and give back its groups that run or wait for a batch."""
        if id(source) in self._feeds:
            feed, _ = self._feeds.pop(id(source))
            await self._set_aside(feed, "the source was closed")
            feed.end(ConfigError("the source was closed while a batch was waited for"))

    async def set_all_aside(self, reason: str) -> None:
        for feed, _ in list(self._feeds.values()):
            await self._set_aside(feed, reason)

    async def _set_aside(self, feed: RowFeed, reason: str) -> None:
        """Stop the feed's running groups and give them and its finished ones back to the source, with their tokens."""
        if running := [*feed.running.values()]:
            try:
                await self.interrupt([episode for s in running for episode in s.episodes])
            finally:  # what was interrupted has to be stopped
                await self.runner.stop(running, reason)
        for group in feed.finished.take(len(feed.finished.groups)):
            feed.keep(group)
            group.end_as(EpisodeStatus.CANCELLED, failure=Failure.cancelled(reason))
            self.gate.give_back()
            self.ended.close(group)
