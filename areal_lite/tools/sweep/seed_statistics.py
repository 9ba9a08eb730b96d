"""Means over seeds with their intervals, and the paired comparison of two variants.

Intervals are Student's t intervals of the mean: they assume that the values of the seeds, or the differences of the
pairs, are about normal. Two variants share seeds, so differences of pairs vary less than the values themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class Verdict(StrEnum):
    """Result of a comparison at its level."""

    BETTER = "better"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Interval:
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
    """Return the verdict on ``second`` against ``first``, and the interval of second - first over the pairs.

    The verdict is inconclusive if the interval holds 0.
    """
    interval = mean_interval([after - before for before, after in zip(first, second, strict=True)], level)
    if interval.low <= 0 <= interval.high:
        return Verdict.INCONCLUSIVE, interval
    return Verdict.BETTER if (interval.mean > 0) != lower_is_better else Verdict.WORSE, interval


def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution with ``freedom`` degrees of freedom.

    Args:
        probability: In [0.5, 1).

    Source: the closed form for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4), by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        if (1 + _central(middle, freedom)) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _central(angle: float, freedom: int) -> float:
    """Return P(\\|T\\| < sqrt(freedom) * tan(angle))."""
    cosine, term, total = math.cos(angle), 1.0, 0.0
    odd = freedom % 2
    if odd:
        term = cosine
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (power - 1) / power
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
