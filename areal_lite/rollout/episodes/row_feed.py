"""Groups drawn ahead of the trainer: accepted ones gather until a batch is cut, others go back to their source.

A feed belongs to one data source. Each group drawn from it ends in one of five ways: handed over in a batch and then
marked as trained, kept with its tokens (stopped or surplus), owed again (too old), retried, or dropped.

The source is user code, and may raise wherever a row is drawn or given back. Raising there would be wrong twice: the
caller is often the callback of a group that ended, where nobody would see the error, and the group would be counted
half. So the error is kept, and whoever waits for a batch gets it; the feed draws nothing more.

A batch may never come: every group is rejected, or the rows end. Groups without training data are counted since the
last accepted one, and beyond a limit the wait ends with the reasons. Stale groups are still counted after an accepted
one: a bound that is too tight lets some groups through and would otherwise redraw the others for ever.

A mistake in the agent, its reward or its rows fails every episode. So until a group has run to its end, a few rows that
fail for one cause end the feed. A server that is down does not: it may return.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from areal_lite.api.failure import FailureKind
from areal_lite.api.trajectory import EpisodeStatus, Group, TaskId
from areal_lite.data.source.rollout_data_source import RolloutDataSource, restarted
from areal_lite.data.source.source_settings import SampleGroup
from areal_lite.errors import ConfigError, EpisodeError, StarvationError
from areal_lite.rollout.episodes.batch_cut import STALE, OldestGroups
from areal_lite.rollout.episodes.ended_groups import PASSING, advice
from areal_lite.rollout.episodes.finished_groups import FinishedGroups
from areal_lite.rollout.episodes.group_runner import Submission
from areal_lite.rollout.episodes.partial_rollout import sampled_group

FIRST_ROWS, FIRST_EPISODES = 3, 8  # must fail for one cause before any other has run to its end


class _FirstRows:
    """Failed episodes of each row by kind and type of their failure, until a group has run to its end."""

    def __init__(self) -> None:
        self._failed: dict[tuple[FailureKind, str], Counter[int | str]] | None = {}

    def judge(self, group: Group) -> EpisodeError | None:
        """Return the error that ends the feed once all episodes of the first rows failed for a cause that stays."""
        if (failure := group.failure) is None:
            self._failed = None
        if self._failed is None or failure is None or failure.kind in PASSING:
            return None
        rows = self._failed.setdefault((failure.kind, failure.type), Counter())
        died = failure.kind is FailureKind.WORKER  # once for all groups of the worker
        rows[failure.message if died else group.samples[0].group_index] += len(group.trajectories)
        if len(rows) < FIRST_ROWS or rows.total() < FIRST_EPISODES:
            return None
        self._failed = None
        failed = f"all {rows.total()} episodes of the first {len(rows)} rows failed"
        fix = "Nothing was trained: mend the agent, its reward or the rows, and start again"
        return EpisodeError(f"{failed}: {failure.summary.rstrip('.')}. {fix}")


class RowFeed:
    """One data source with the accepted groups that wait for a batch."""

    def __init__(self, source: RolloutDataSource, *, retries: int) -> None:
        self.source = source
        self.finished = FinishedGroups()
        self.running: dict[TaskId, Submission] = {}
        self.exhausted = False
        self.error: Exception | None = None  # ended the feed: the source's own exception, or one for failed episodes
        self.waited_for_oldest_s = 0.0  # seconds that a full batch waited for running groups, see OldestGroups
        self.oldest_groups = OldestGroups()
        self._full_since: float | None = None
        self._retries = retries
        self._handed_over: list[SampleGroup] = []
        self._misses: Counter[tuple[str, FailureKind | None]] = Counter()  # by reason and kind of failure, if it failed
        self._first_rows = _FirstRows()

    def next_group(self) -> SampleGroup | None:
        """Return the next group; None once the source has ended."""
        if not self.exhausted and self.error is None:
            with self._source_at_work():
                for group in self.source.get_samples(1):
                    return group
                self.exhausted = True
                self.finished.changed()
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
        self.error = error
        self.finished.changed()

    @property
    def ahead(self) -> int:
        return len(self.running) + len(self.finished.groups)

    def wait_for_oldest(self, running: Mapping[TaskId, int], oldest_allowed: int | None) -> None:
        """Make the next batch wait for running groups that would otherwise grow too old. ``running`` has the version of
        the oldest token of each group that has one; without ``oldest_allowed``, wait for none."""
        self._full_since = None
        self.oldest_groups = OldestGroups(oldest_allowed)
        for task_id, version in running.items():
            self.oldest_groups.add_running(task_id, version)
        for group in self.finished.groups:
            self.oldest_groups.add_finished(group)

    def accept(self, group: Group) -> None:
        """Keep an accepted group for a batch, and reset the counts of missed groups except stale ones."""
        self._first_rows.judge(group)
        self._misses = Counter({miss: n for miss, n in self._misses.items() if miss[0] == STALE})
        self.oldest_groups.add_finished(group)
        self.finished.put(group)

    def hand_over(self, groups: list[Group]) -> None:
        """Record the batch just cut, mark the one before as trained, and reset the counts of missed groups."""
        self.mark_trained()
        self._misses.clear()
        self._handed_over = [group.samples for group in groups]

    def take_back(self, batch: list[Group]) -> bool:
        """Keep the last batch, which never reached its caller, for the next cut; return False for any other."""
        if [group.samples for group in batch] != self._handed_over:
            return False
        self._handed_over = []
        self.finished.put_back(batch)
        return True

    def mark_trained(self) -> None:
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
        self.finished.changed()

    def miss(self, group: Group) -> None:
        """Count a group that ended without training data; the row of a failed one is retried a few times."""
        with self._source_at_work():
            if group.status is EpisodeStatus.FAILED and group.samples[0].attempts < self._retries:
                for sample in group.samples:
                    sample.attempts += 1
                self._return(restarted(group.samples))
            else:
                self.source.drop(group.samples, drop_reason(group))
        self.count_miss(miss_reason(group), None if group.failure is None else group.failure.kind)
        if (mistake := self._first_rows.judge(group)) is not None:
            self.end(mistake)

    def _return(self, samples: SampleGroup) -> None:
        self.source.give_back([samples])
        self.exhausted = False

    def count_miss(self, reason: str, kind: FailureKind | None = None) -> None:
        self._misses[reason, kind] += 1
        self.finished.changed()

    def ready(self, count: int, max_misses: int) -> Callable[[], bool]:
        """Return the condition to wait for: a batch is complete, or certain never to be."""
        return lambda: (
            self._complete(count) or self.error is not None or self._misses.total() >= max_misses or self._ended()
        )

    def _complete(self, count: int) -> bool:
        if len(self.finished.groups) < count:
            return False
        now = time.monotonic()
        self._full_since = self._full_since or now
        if self.oldest_groups.hold_up(count):
            return False
        self.waited_for_oldest_s += now - self._full_since
        self._full_since = None
        return True

    def ended(self, group: Group) -> None:
        del self.running[group.task_id]
        self.oldest_groups.remove_running(group.task_id)

    def check(self, count: int) -> None:
        """Raise what ended the wait of :meth:`ready`, unless a batch is complete."""
        if self.error is not None:
            raise self.error
        if len(self.finished.groups) >= count:
            return
        if self._ended():
            left = len(self.finished.groups)
            what = f"ended with {left} groups left" if self.source.sample_index else "has no rows"
            raise ConfigError(
                f"the source of rows {what}, fewer than consumer_batch_size={count}: give an iterable that can be "
                "iterated again (a list), more rows, or a smaller batch"
            )
        reasons = "; ".join(f"{n} x {reason}" for (reason, _), n in self._misses.most_common(5))
        fix = advice(reason for reason, _ in self._misses)
        misses = self._misses.total()
        kinds = {kind for reason, kind in self._misses if reason != STALE}
        self._misses.clear()
        raise StarvationError(
            f"no batch of {count} groups: {misses} groups ended without training data ({reasons}): {fix}",
            may_pass=bool(kinds) and kinds <= PASSING,
        )

    def _ended(self) -> bool:
        return self.exhausted and not self.running


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
