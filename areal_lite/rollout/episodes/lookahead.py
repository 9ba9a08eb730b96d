"""How far generation runs ahead of training: just in time, for the freshest tokens at the same step time.

A pure controller of one number, the groups ahead: divided by the batch size, it is the mean staleness of a run. One
batch ahead overlaps generation with training. More is tried while the trainer lacks finished groups, and kept only if
steps get shorter; finished groups left over while the trainer is busy reduce it. If more did not help, generation is
the bottleneck, and less than one batch ahead is tried.

Two signals look right and are not. The time that the trainer waits for a batch alone would grow the lookahead without
end where generation is the bottleneck: more groups at once then only make each slower and staler. The number of
finished groups alone would shrink it while batches wait for their oldest groups, and quick groups would overtake those
even further. So more must prove itself in the step time, which varies: a trial lasts a window of batches, and after
each failure the next trial is put off longer.
"""

import copy
import math
from dataclasses import dataclass, field

WINDOW = 8  # batches between two decisions
IDLE = 0.05  # share of its time that the trainer may wait before it counts as waiting
CHANGE = 1.5  # factor between the lookaheads of a trial
GAIN = 0.95  # more groups ahead stay if they cut the step time to this share; fewer, unless the more had done so
PATIENCE = (4, 64)  # windows without a trial after a failed one: the first, doubled at each failure up to the second


@dataclass(slots=True)
class Lookahead:
    """Groups that may start before the batch that needs them, up to the bound; at first half of it, or one batch."""

    batch_size: int
    max_staleness: int
    groups: int = field(init=False)
    _least: int = field(init=False)
    _most: int = field(init=False)
    _batches: int = 0
    _step_s: float = 0.0
    _starved_s: float = 0.0
    _waited_s: float = 0.0
    _spare: int | None = None
    _before: tuple[int, float] | None = None  # lookahead and seconds of the window before the running trial
    _grows: bool = True  # True if the next trial raises the lookahead
    _hold: int = 0  # windows left without a trial
    _patience: int = PATIENCE[0]

    def __post_init__(self) -> None:
        self._most = self.max_staleness * self.batch_size
        self._least = min(self.batch_size, self._most)
        self.groups = max(self._least, self._most // 2)

    def batch_cut(self, *, step_s: float, waited_s: float, starved_s: float, spare: int) -> None:
        """Record a batch, ``step_s`` after the one before. The trainer waited ``waited_s`` of it, ``starved_s`` of that
        with too few finished groups for a batch; in the rest a full batch waited for the oldest groups, which a larger
        lookahead would not speed up. ``spare`` finished groups were left over."""
        self._batches += 1
        self._step_s += step_s
        self._waited_s += waited_s
        self._starved_s += starved_s
        self._spare = spare if self._spare is None else min(self._spare, spare)
        if self._batches == WINDOW:
            self._decide(self._step_s, self._spare)
            self._batches, self._step_s, self._waited_s, self._starved_s, self._spare = 0, 0.0, 0.0, 0.0, None

    def forecast(self, batches: int) -> float:
        """Return the mean lookahead of the next ``batches``, at least one, if they go as since the last decision."""
        ahead, seen, groups = copy.copy(self), max(1, self._batches), list[int]()
        for _ in range(batches):
            groups.append(ahead.groups)
            ahead.batch_cut(
                step_s=self._step_s / seen,
                waited_s=self._waited_s / seen,
                starved_s=self._starved_s / seen,
                spare=self._spare or 0,
            )
        return sum(groups) / batches

    def _decide(self, step_s: float, spare: int) -> None:
        if self._before is not None:
            groups, before_s = self._before
            self._before = None
            grew = self.groups > groups
            if step_s > before_s * (GAIN if grew else 1 / GAIN):
                self.groups, self._grows, self._hold = groups, not grew, self._patience
                self._patience = min(2 * self._patience, PATIENCE[1])
                return
            self._patience = PATIENCE[0]
        if self._waited_s <= IDLE * self._step_s:
            # Not while batches wait for their oldest groups: fast groups would overtake those even further.
            self.groups = min(self.groups, max(self._least, self.groups - spare))
        elif self._starved_s > IDLE * self._step_s:
            if not self._hold:
                self._try(step_s, self._least)
                return
            self._hold -= 1
            # Generation is the bottleneck if more did not help: it needs work for the time that the trainer is busy.
            least = max(1, math.ceil((1 - self._waited_s / self._step_s) * self.batch_size))
            if not self._grows and least < self.groups <= self._least:
                self._try(step_s, least)

    def _try(self, step_s: float, least: int) -> None:
        """Begin a trial; at a limit of the lookahead, in the other direction."""
        if not least < self.groups < self._most:
            self._grows = self.groups < self._most
        groups = int(self.groups * CHANGE) + 1 if self._grows else int(self.groups / CHANGE)
        groups = min(self._most, max(least, groups))
        if groups != self.groups:
            self._before, self.groups = (self.groups, step_s), groups
