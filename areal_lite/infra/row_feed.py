"""Rows drawn ahead of the trainer, and the cut of a batch that keeps the staleness bound.

A feed belongs to one source of rows. The executor starts its rows as the gate lets it; accepted
results gather here until a batch is cut.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from areal_lite.api.engine_api import Row
from areal_lite.api.episode import EpisodeResult, EpisodeStatus
from areal_lite.errors import ConfigError, StarvationError
from areal_lite.infra.result_box import ResultBox

STALE = "stale: older than max_head_offpolicyness allows"


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch within the bound, and what was too stale to be in it."""

    fresh: list[EpisodeResult]
    stale: list[EpisodeResult]


def cut_batch(results: list[EpisodeResult], count: int, *, version: int, max_staleness: int) -> Cut:
    """Take the ``count`` results submitted first among those within the staleness bound.

    Staleness is ``version`` minus the version of the oldest trained token. Older results come out as
    stale; the rest stays in ``results``, which is changed in place. With fewer than ``count`` fresh
    results nothing fresh is taken.
    """
    stale = [r for r in results if version - _oldest(r) > max_staleness]
    fresh = [r for r in results if version - _oldest(r) <= max_staleness]
    fresh.sort(key=lambda r: r.start_order)
    taken = fresh[:count] if len(fresh) >= count else []
    results[:] = fresh[len(taken) :]
    return Cut(taken, stale)


def _oldest(result: EpisodeResult) -> int:
    return result.start_version if result.head_version is None else result.head_version


class RowFeed:
    """One source of rows with the accepted results that wait for a batch."""

    def __init__(self, source: Iterable[Row]) -> None:
        self.source = source
        self.box = ResultBox()
        self.running = 0
        self.exhausted = False
        self.error: Exception | None = None
        """What ended the feed: the source's own exception, or an episode's under ``on_error: raise``."""
        self._rows: Iterator[Row] = iter(source)
        self._endless = self._rows is not source
        self._rows_this_epoch = 0
        self._owed: deque[Row] = deque()
        self._misses: Counter[str] = Counter()

    def next_row(self) -> Row | None:
        """Return the next row, owed ones first; None once the source has ended.

        An iterable is begun anew each time it ends; an iterator ends for good.
        """
        if self._owed:
            return self._owed.popleft()
        while not self.exhausted:
            try:
                row = next(self._rows)
            except StopIteration:
                if not self._endless or self._rows_this_epoch == 0:
                    self.exhausted = True
                    break
                self._rows, self._rows_this_epoch = iter(self.source), 0
            except Exception as error:  # the source is user code; its error belongs to whoever waits
                self.error, self.exhausted = error, True
                break
            else:
                self._rows_this_epoch += 1
                return row
        self.box.changed()
        return None

    @property
    def ahead(self) -> int:
        """Groups that run or wait for a batch."""
        return self.running + len(self.box.results)

    def accept(self, result: EpisodeResult) -> None:
        """Keep an accepted group for a batch; groups missed before it are forgiven, stale ones are not."""
        self._misses = Counter({STALE: self._misses[STALE]})
        self.box.put(result)

    def owe(self, result: EpisodeResult) -> None:
        """Put the row of a stale group back, to be drawn before all others."""
        self._owed.append(result.data)
        self.count_miss(STALE)

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
                if not self._rows_this_epoch
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
        return self.exhausted and not self._owed and self.running == 0


def miss_reason(result: EpisodeResult) -> str:
    """Return why a result is not trained, short enough to count by."""
    if result.status is EpisodeStatus.REJECTED:
        return result.error or "rejected by the workflow"
    last_line = (result.error or "").strip().rsplit("\n", 1)[-1]
    return f"{result.status}: {last_line[:200]}"
