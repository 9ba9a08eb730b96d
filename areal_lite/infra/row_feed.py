"""Groups drawn ahead of the trainer, and the cut of a batch that keeps the staleness bound.

A feed belongs to one data source. The executor starts its groups as the gate lets it; accepted results
gather here until a batch is cut, and whatever is not trained goes back to the source.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from areal_lite.api.episode import EpisodeResult, EpisodeStatus
from areal_lite.api.tensor_dict import trained_version_range
from areal_lite.data.source.rollout_data_source import Group, RolloutDataSource, restarted
from areal_lite.errors import ConfigError, StarvationError
from areal_lite.infra.partial_rollout import sampled_group
from areal_lite.infra.result_box import ResultBox

STALE = "stale: older than max_head_offpolicyness allows"


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch within the bound, and what was too stale to be in it."""

    fresh: list[EpisodeResult]
    stale: list[EpisodeResult]


def cut_batch(
    results: list[EpisodeResult],
    count: int,
    *,
    version: int,
    max_staleness: int,
    mask_off_policy: bool = False,
) -> Cut:
    """Take the ``count`` results submitted first among those within the staleness bound.

    Staleness is ``version`` minus the version of the oldest trained token. Older results come out as
    stale; the rest stays in ``results``, which is changed in place. With fewer than ``count`` fresh
    results nothing fresh is taken.

    Args:
        results: Accepted results that wait.
        count: Groups of the batch.
        version: The trainer's policy version.
        max_staleness: The bound.
        mask_off_policy: Take older tokens out of the training of a result that has newer ones too.
    """
    oldest_version = version - max_staleness
    if mask_off_policy:
        for result in results:
            if _oldest(result) < oldest_version:
                _mask_older(result, oldest_version)
    stale = [r for r in results if _oldest(r) < oldest_version]
    fresh = [r for r in results if _oldest(r) >= oldest_version]
    fresh.sort(key=lambda r: r.start_order)
    taken = fresh[:count] if len(fresh) >= count else []
    results[:] = fresh[len(taken) :]
    return Cut(taken, stale)


def _mask_older(result: EpisodeResult, oldest_version: int) -> None:
    """Set loss_mask to 0 where a token is older, unless nothing would be left."""
    trajectory = result.trajectory or {}
    if "versions" not in trajectory or "loss_mask" not in trajectory:
        return
    newer = trajectory["loss_mask"] * (trajectory["versions"] >= oldest_version)
    masked = trajectory | {"loss_mask": newer.to(trajectory["loss_mask"].dtype)}
    versions = trained_version_range(masked)
    if versions is not None:
        result.trajectory = masked
        result.head_version, result.tail_version = versions


def _oldest(result: EpisodeResult) -> int:
    return result.start_version if result.head_version is None else result.head_version


class RowFeed:
    """One data source with the accepted results that wait for a batch."""

    def __init__(self, source: RolloutDataSource, *, retries: int) -> None:
        self.source = source
        self.box = ResultBox()
        self.running = 0
        self.exhausted = False
        self.error: Exception | None = None
        """What ended the feed: the source's own exception, or an episode's under ``on_error: raise``."""
        self._retries = retries
        self._handed_over: list[Group] = []
        self._misses: Counter[str] = Counter()

    def next_group(self) -> Group | None:
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
        """End the feed with what the source raises: it is user code, and its error belongs to whoever waits."""
        try:
            yield
        except Exception as error:
            self.end(error)
        except BaseException as error:
            self.end(RuntimeError(f"the data source raised {error!r}"))

    def end(self, error: Exception) -> None:
        """Draw no more; whoever waits for a batch gets ``error``."""
        self.error, self.exhausted = error, True
        self.box.changed()

    @property
    def ahead(self) -> int:
        """Groups that run or wait for a batch."""
        return self.running + len(self.box.results)

    def accept(self, result: EpisodeResult) -> None:
        """Keep an accepted group for a batch; groups missed before it are forgiven, stale ones are not."""
        self._misses = Counter({STALE: self._misses[STALE]})
        self.box.put(result)

    def hand_over(self, results: list[EpisodeResult]) -> None:
        """Note the batch that is cut: by the time of the next one it was trained."""
        self.settle()
        self._handed_over = [result.samples for result in results]

    def take_back(self, batch: list[EpisodeResult]) -> None:
        """Keep the batch handed over last, which nobody got, for the next cut."""
        self._handed_over = []
        self.box.put_back(batch)

    def settle(self) -> None:
        """The batch handed over last was trained."""
        self.source.mark_trained(self._handed_over)
        self._handed_over = []

    def owe(self, result: EpisodeResult) -> None:
        """Put the row of a stale group back, to be drawn before all others."""
        with self._source_at_work():
            self._return(restarted(result.samples))
        self.count_miss(STALE)

    def keep(self, result: EpisodeResult) -> None:
        """Put a stopped or surplus group back with what it has sampled."""
        with self._source_at_work():
            self._return(sampled_group(result))

    def miss(self, result: EpisodeResult) -> None:
        """Note a group that ended without training data; the row of a failed one is drawn again a few times."""
        with self._source_at_work():
            if result.status is EpisodeStatus.FAILED and result.samples[0].attempts < self._retries:
                for sample in result.samples:
                    sample.attempts += 1
                self._return(restarted(result.samples))
            else:
                self.source.drop(result.samples, drop_reason(result))
        self.count_miss(miss_reason(result))

    def _return(self, group: Group) -> None:
        self.source.give_back([group])
        self.exhausted = False

    def count_miss(self, reason: str) -> None:
        """Count a group that ended without training data."""
        self._misses[reason] += 1
        self.box.changed()

    def ready(self, count: int, max_misses: int) -> Callable[[], bool]:
        """Return the condition to wait for: a batch is there, or it is certain that none will come."""

        def condition() -> bool:
            return (
                len(self.box.results) >= count
                or self.error is not None
                or self._misses.total() >= max_misses
                or self._ended()
            )

        return condition

    def check(self, count: int) -> None:
        """Raise what ended the wait of :meth:`ready` unless a batch is there.

        Raises:
            StarvationError: If too many groups in a row were not accepted.
            ConfigError: If the source ended with less than a batch left.
        """
        if self.error is not None:
            raise self.error
        if len(self.box.results) >= count:
            self._misses.clear()
            return
        if self._ended():
            what = (
                "has no rows"
                if not self.source.sample_index
                else f"ended with {len(self.box.results)} groups left"
            )
            raise ConfigError(
                f"the source of rows {what}, fewer than consumer_batch_size={count}: give an iterable that can be "
                "begun anew (a list), more rows, or a smaller batch"
            )
        reasons = "; ".join(f"{n} x {reason}" for reason, n in self._misses.most_common(5))
        misses = self._misses.total()
        self._misses.clear()
        raise StarvationError(
            f"no batch of {count} groups: {misses} groups ended without training data ({reasons}). "
            "Look at the dump for their errors, or loosen the filter"
        )

    def _ended(self) -> bool:
        return self.exhausted and self.running == 0


_RAISED = re.compile(r'^  File ".*\n(?:  .*\n)*(?:[\w<>]+\.)*(\w+)', re.MULTILINE)
"""The last frames of a formatted traceback, and the type of the exception in the line below."""


def drop_reason(result: EpisodeResult) -> str:
    """Return the kind of miss to count by: messages of errors hold ids, and the counts are saved for ever."""
    error = result.error or ""
    if result.status is EpisodeStatus.REJECTED or "\n" not in error:
        return miss_reason(result)
    raised = _RAISED.findall(re.sub(r"^ +\| ", "", error, flags=re.MULTILINE))  # of exception groups, too
    return f"{result.status}: {raised[-1] if raised else 'an error of a long message'}"


def miss_reason(result: EpisodeResult) -> str:
    """Return why a result is not trained, in a line."""
    if result.status is EpisodeStatus.REJECTED:
        return result.error or "rejected by the workflow"
    last_line = (result.error or "").strip().rsplit("\n", 1)[-1]
    return f"{result.status}: {last_line[:200]}"
