"""Counts each group and passes it on to be dumped, once, when its end is final.

An accepted group is not final when its episodes end: a batch may find it too old, or its source may take it back. So
the executor passes what nobody waits for at once, and accepted groups of a data source only when their batch is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from areal_lite.api.scalars import Scalars
from areal_lite.api.trajectory import EpisodeStatus, Group, TaskId
from areal_lite.rollout.episodes.failure_tally import FailureTally
from areal_lite.rollout.episodes.rollout_statistics import RolloutStatistics


class EndedGroups:
    """Figures of the groups that have ended; ``on_end`` gets each final group once, and must not raise or block."""

    def __init__(self, on_end: Callable[[Group], None]) -> None:
        self.on_end = on_end
        self.counts: Counter[str] = Counter(dict.fromkeys(EpisodeStatus, 0))
        """Number of ended groups by status."""
        self.statistics = RolloutStatistics()
        self.failures = FailureTally()
        self.scalars = Scalars()
        """Numbers that the episodes of accepted groups recorded."""
        self._unclaimed: set[TaskId] = set()
        """Groups of batches that never reached their caller; already counted and dumped."""

    def close(self, group: Group) -> None:
        """Count a final group and pass it to ``on_end``."""
        if group.task_id in self._unclaimed:
            self._unclaimed.remove(group.task_id)
            return
        self.counts[group.status] += 1
        self.failures.add(group)
        if group.status is EpisodeStatus.ACCEPTED:
            self.scalars.add(group)
        self.on_end(group)

    def close_batch(self, batch: Sequence[Group]) -> None:
        """Count the groups of a batch as trained, and close them."""
        self.statistics.train([group for group in batch if group.task_id not in self._unclaimed])
        for group in batch:
            self.close(group)

    def reopen(self, batch: Sequence[Group]) -> None:
        """Take back a batch whose caller left; its groups are not counted again when they end another time."""
        self._unclaimed.update(group.task_id for group in batch)
