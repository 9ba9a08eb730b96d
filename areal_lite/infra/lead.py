"""How far generation runs ahead of training: just in time, so that tokens are as fresh as the step time allows.

A pure controller. One batch ahead keeps generation and training overlapped, at a staleness of 1. More is
granted while the trainer waits for episodes and the last grant made steps shorter, and taken back when
groups lie waiting for the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

WINDOW = 4
"""Cuts between two decisions."""
WAITED = 0.05
"""Share of a step that the trainer may wait before more is granted."""
GROWTH = 1.5
GAIN = 0.97
"""A grant stays if steps take at most this share of the time they took before."""
PATIENCE = 4
"""Windows without another grant after one that did not help."""


@dataclass(slots=True)
class Lead:
    """Groups that may start before the batch that needs them, at most ``max_staleness`` batches."""

    batch_size: int
    max_staleness: int
    groups: int = field(init=False)
    _steps: list[float] = field(default_factory=list)
    _waits: list[float] = field(default_factory=list)
    _spares: list[int] = field(default_factory=list)
    _before: tuple[int, float] | None = None
    """Groups and step time before a grant that is on trial."""
    _hold: int = 0
    """Windows left without a grant."""

    def __post_init__(self) -> None:
        self.groups = self._least

    @property
    def _least(self) -> int:
        return min(1, self.max_staleness) * self.batch_size

    def batch_cut(self, *, step_s: float, waited_s: float, spare: int) -> None:
        """Take note of a batch.

        Args:
            step_s: Seconds since the batch before.
            waited_s: Seconds of it that the trainer waited for episodes.
            spare: Finished groups left over after the cut.
        """
        self._steps.append(step_s)
        self._waits.append(waited_s)
        self._spares.append(spare)
        if len(self._steps) == WINDOW:
            self._decide(median(self._steps), sum(self._waits) / sum(self._steps), min(self._spares))
            self._steps, self._waits, self._spares = [], [], []

    def _decide(self, step_s: float, waited: float, spare: int) -> None:
        if self._before is not None:
            groups, before_s = self._before
            self._before = None
            if step_s > GAIN * before_s:  # it bought nothing but age
                self.groups, self._hold = groups, PATIENCE
                return
        self._hold = max(0, self._hold - 1)
        most = self.max_staleness * self.batch_size
        if waited > WAITED and self.groups < most and not self._hold:
            self._before = (self.groups, step_s)
            self.groups = min(most, int(self.groups * GROWTH) + 1)
        elif waited <= WAITED and spare:
            self.groups = max(self._least, self.groups - spare)
