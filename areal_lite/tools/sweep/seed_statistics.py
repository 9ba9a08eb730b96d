"""Means over seeds with their intervals, and the paired comparison of two variants.

Intervals are Student's t intervals of the mean: they assume that the values of the seeds, or the differences of the
pairs, are about normal. Two variants share seeds, so differences of pairs vary less than the values themselves.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple
import numpy as np

Verdict = Literal["better", "worse", "inconclusive"]


class Interval(NamedTuple):
    """A mean and the interval that holds the true mean with the level's probability."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.mean:.4g} (no interval of one seed)"
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the mean of ``values`` with its interval; for a single value it is infinite."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    half = t_quantile((1 + level) / 2, count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def compare_pairs(
    first: Sequence[float], second: Sequence[float], *, level: float = 0.95, lower_is_better: bool = False
) -> tuple[Verdict, Interval]:
    """Return the verdict on ``second`` against ``first``, and the interval of second - first over the pairs. The
    verdict is inconclusive if the interval holds 0."""
    interval = mean_interval([after - before for before, after in zip(first, second, strict=True)], level)
    if interval.low <= 0 <= interval.high:
        return "inconclusive", interval
    return "better" if (interval.mean > 0) != lower_is_better else "worse", interval


def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile at ``probability`` in [0.5, 1) of Student's t with ``freedom`` degrees of freedom. Source: T
    is sqrt(freedom) * tan(angle) for an angle with a density proportional to cos(angle) ** (freedom - 1)."""
    angles = np.linspace(0.0, np.pi / 2, 200_001)
    shares = np.concatenate([[0.0], np.cumsum(np.cos((angles[:-1] + angles[1:]) / 2) ** (freedom - 1))])
    return math.sqrt(freedom) * math.tan(np.interp(2 * probability - 1, shares / shares[-1], angles))
