"""Groups drawn ahead of the trainer, and the cut of a batch within the staleness bound.

A feed belongs to one data source. The executor starts its groups when the gate allows; accepted groups
gather here until a batch is cut, and untrained ones go back to the source. Guarantees that no batch has a
token beyond the bound and, with ``stale_groups: wait``, that batches are cut in time for the oldest groups.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from areal_lite.api.failure import FailureKind
from areal_lite.api.trajectory import EpisodeStatus, Group, TaskId
from areal_lite.data.source.rollout_data_source import RolloutDataSource, restarted
from areal_lite.data.source.source_settings import SampleGroup
from areal_lite.errors import ConfigError, StarvationError
from areal_lite.rollout.episodes.failure_tally import PASSING
from areal_lite.rollout.episodes.finished_groups import ResultBox
from areal_lite.rollout.episodes.partial_rollout import sampled_group

STALE = "stale: older than max_head_offpolicyness allows"


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch within the bound, and what was too stale to be in it."""

    fresh: list[Group]
    stale: list[Group]
    masked_tokens: int = 0


def cut_batch(
    groups: list[Group], count: int, *, version: int, max_staleness: int, mask_off_policy: bool = False
) -> Cut:
    """Take ``count`` groups within the staleness bound: oldest tokens first, then earliest start.

    Staleness is ``version`` minus the version of the oldest trained token. Older groups come out as
    stale; the rest stays in ``groups``, which is changed in place. With fewer than ``count`` fresh
    groups nothing fresh is taken.

    Args:
        groups: Accepted groups that wait.
        count: Groups of the batch.
        version: The trainer's policy version.
        max_staleness: The bound.
        mask_off_policy: Mask tokens beyond the bound and train on the rest.
    """
    oldest_version = version - max_staleness
    too_old = [group for group in groups if _oldest(group) < oldest_version] if mask_off_policy else []
    masked_tokens = sum(_mask_older(group, oldest_version) for group in too_old)
    stale = [group for group in groups if _oldest(group) < oldest_version]
    fresh = [group for group in groups if _oldest(group) >= oldest_version]
    fresh.sort(key=lambda group: (_oldest(group), group.start_order))
    taken = fresh[:count] if len(fresh) >= count else []
    groups[:] = fresh[len(taken) :]
    return Cut(taken, stale, masked_tokens)


def _mask_older(group: Group, oldest_version: int) -> int:
    """Mask older tokens, unless none would remain; return how many."""
    kept = [
        (sequence, sequence.versions >= oldest_version) for sequence in group.sequences if sequence.versions is not None
    ]
    before = sum(sequence.num_trained_tokens for sequence, _ in kept)
    after = sum(int((sequence.loss_mask & newer).sum()) for sequence, newer in kept)
    if not after:
        return 0
    for sequence, newer in kept:
        sequence.loss_mask &= newer  # in place: the turns see it
    group.note_versions()
    return before - after


def _oldest(group: Group) -> int:
    return group.start_version if group.head_version is None else group.head_version


def must_wait(running: Mapping[int, int], finished: Mapping[int, int], count: int) -> bool:
    """Return whether a batch cut now would leave a running group without a place in a later batch.

    A group of slack ``s`` fits into this batch or the next ``s``; after those it is beyond the staleness bound.
    Groups of slack ``s`` or less therefore fit if at most ``s * count`` of them are left over by this batch,
    which takes the finished ones of least slack first.

    Args:
        running: Number of running groups by slack.
        finished: Number of finished groups by slack.
        count: Groups per batch.
    """
    due = ready = 0
    for slack in sorted({*running, *finished}):
        ready += finished.get(slack, 0)
        due += running.get(slack, 0) + finished.get(slack, 0)
        if min(due - slack * count, count) > ready:
            return True
    return False


class RowFeed:
    """One data source with the accepted groups that wait for a batch."""

    def __init__(self, source: RolloutDataSource, *, retries: int) -> None:
        self.source = source
        self.box = ResultBox()
        self.running = 0
        self.exhausted = False
        self.error: Exception | None = None
        """What ended the feed: the source's own exception, or an episode's under ``on_error: raise``."""
        self.waited_for_oldest_s = 0.0
        """Seconds that a full batch waited for running groups, see :func:`must_wait`."""
        self._full_since: float | None = None
        self._oldest_allowed: int | None = None
        """Oldest version that this batch may train; None if it waits for no running group."""
        self._slack: dict[TaskId, int] = {}
        """Slack by running group: number of later batches that it may still be in."""
        self._running_by_slack: Counter[int] = Counter()
        self._finished_by_slack: Counter[int] = Counter()
        self._retries = retries
        self._handed_over: list[SampleGroup] = []
        self._misses: Counter[str] = Counter()
        self._missed_kinds: set[FailureKind | None] = set()
        """Kinds of failure among the misses; None for a group that did not fail."""

    def next_group(self) -> SampleGroup | None:
        """Return the next group; None once the source has ended."""
        if not self.exhausted and self.error is None:
            with self._source_at_work():
                for group in self.source.get_samples(1):
                    return group
                self.exhausted = True
                self.box.changed()
        return None

    @contextlib.contextmanager
    def _source_at_work(self) -> Iterator[None]:
        """End the feed if the source, which is user code, raises; whoever waits for a batch gets the error."""
        try:
            yield
        except Exception as error:
            self.end(error)
        except BaseException as error:
            self.end(RuntimeError(f"the data source raised {error!r}"))

    def end(self, error: Exception) -> None:
        """Stop drawing; whoever waits for a batch gets ``error``."""
        self.error = error
        self.box.changed()

    @property
    def ahead(self) -> int:
        """Groups that run or wait for a batch."""
        return self.running + len(self.box.groups)

    def wait_for_oldest(self, running: Mapping[TaskId, int], oldest_allowed: int | None) -> None:
        """Make the next batch wait for running groups that would otherwise grow too old.

        Args:
            running: Version of the oldest token of each running group that has one.
            oldest_allowed: Oldest version that the batch may train; None waits for no running group.
        """
        self._full_since = None
        self._oldest_allowed = oldest_allowed
        self._slack.clear()
        self._running_by_slack.clear()
        self._finished_by_slack.clear()
        if oldest_allowed is not None:
            for task_id, version in running.items():
                self.note_running(task_id, version)
            self._finished_by_slack.update(self._slack_of(_oldest(group)) for group in self.box.groups)

    def note_running(self, task_id: TaskId, version: int) -> None:
        """Record a running group whose oldest token has ``version``."""
        if self._oldest_allowed is not None:
            slack = self._slack[task_id] = self._slack_of(version)
            self._running_by_slack[slack] += 1

    def _slack_of(self, version: int) -> int:
        assert self._oldest_allowed is not None
        return max(0, version - self._oldest_allowed)

    def accept(self, group: Group) -> None:
        """Keep an accepted group for a batch, and reset the counts of missed groups except stale ones."""
        self._misses = Counter({STALE: self._misses[STALE]})
        self._missed_kinds.clear()
        if self._oldest_allowed is not None:
            self._finished_by_slack[self._slack_of(_oldest(group))] += 1
        self.box.put(group)

    def hand_over(self, groups: list[Group]) -> None:
        """Record the batch just cut, mark the one before as trained, and reset the counts of missed groups."""
        self.mark_trained()
        self._misses.clear()
        self._missed_kinds.clear()
        self._handed_over = [group.samples for group in groups]

    def take_back(self, batch: list[Group]) -> None:
        """Keep the last batch, which never reached its caller, for the next cut."""
        self._handed_over = []
        self.box.put_back(batch)

    def mark_trained(self) -> None:
        """Mark the last batch as trained."""
        self.source.mark_trained(self._handed_over)
        self._handed_over = []

    def owe(self, group: Group) -> None:
        """Return the row of a stale group to the source, to be drawn before all others."""
        with self._source_at_work():
            self._return(restarted(group.samples))
        self.count_miss(STALE)

    def keep(self, group: Group) -> None:
        """Return a stopped or surplus group to the source with what it has sampled."""
        with self._source_at_work():
            self._return(sampled_group(group))
        self.box.changed()

    def miss(self, group: Group) -> None:
        """Count a group that ended without training data; the row of a failed one is retried a few times."""
        with self._source_at_work():
            if group.status is EpisodeStatus.FAILED and group.samples[0].attempts < self._retries:
                for sample in group.samples:
                    sample.attempts += 1
                self._return(restarted(group.samples))
            else:
                self.source.drop(group.samples, drop_reason(group))
        self._missed_kinds.add(None if group.failure is None else group.failure.kind)
        self.count_miss(miss_reason(group))

    def _return(self, samples: SampleGroup) -> None:
        self.source.give_back([samples])
        self.exhausted = False

    def count_miss(self, reason: str) -> None:
        """Count a group that ended without training data."""
        self._misses[reason] += 1
        self.box.changed()

    def ready(self, count: int, max_misses: int) -> Callable[[], bool]:
        """Return the condition to wait for: a batch is complete, or certain never to be."""

        def condition() -> bool:
            return (
                self._complete(count) or self.error is not None or self._misses.total() >= max_misses or self._ended()
            )

        return condition

    def _complete(self, count: int) -> bool:
        """Return whether there is a batch, and no running group that it has to wait for."""
        if len(self.box.groups) < count:
            return False
        now = time.monotonic()
        self._full_since = self._full_since or now
        if self._slack and must_wait(self._running_by_slack, self._finished_by_slack, count):
            return False
        self.waited_for_oldest_s += now - self._full_since
        self._full_since = None
        return True

    def ended(self, group: Group) -> None:
        """Record that a running group ended, with any status."""
        self.running -= 1
        if (slack := self._slack.pop(group.task_id, None)) is not None:
            self._running_by_slack[slack] -= 1

    def check(self, count: int) -> None:
        """Raise what ended the wait of :meth:`ready`, unless a batch is complete.

        Raises:
            StarvationError: If too many groups in a row were not accepted.
            ConfigError: If the source ended with less than a batch left.
        """
        if self.error is not None:
            raise self.error
        if len(self.box.groups) >= count:
            return
        if self._ended():
            what = "has no rows" if not self.source.sample_index else f"ended with {len(self.box.groups)} groups left"
            raise ConfigError(
                f"the source of rows {what}, fewer than consumer_batch_size={count}: give an iterable that can be "
                "iterated again (a list), more rows, or a smaller batch"
            )
        reasons = "; ".join(f"{n} x {reason}" for reason, n in self._misses.most_common(5))
        misses = self._misses.total()
        may_pass = bool(self._missed_kinds) and self._missed_kinds <= PASSING
        self._misses.clear()
        self._missed_kinds.clear()
        raise StarvationError(
            f"no batch of {count} groups: {misses} groups ended without training data ({reasons}). "
            "Look at the dump for their errors, or loosen the filter",
            may_pass=may_pass,
        )

    def _ended(self) -> bool:
        return self.exhausted and self.running == 0


def drop_reason(group: Group) -> str:
    """Return the label to count a miss by; without messages, which hold ids, since the counts are saved."""
    if group.failure is None:
        return miss_reason(group)
    return f"{group.status}: {group.failure.type or group.failure.kind}"


def miss_reason(group: Group) -> str:
    """Return in one line why a group is not trained."""
    if group.failure is None:
        return group.rejection or "rejected by the workflow"
    return f"{group.status}: {group.failure.summary}"
