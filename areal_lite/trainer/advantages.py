"""Advantages: how much better a sequence was than its group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STD_FLOOR = 1e-6
"""Added to a group's standard deviation, as verl does."""


def group_advantages(
    rewards: Sequence[float] | NDArray[np.floating], group_ids: Sequence[str], *, divide_by_std: bool = True
) -> NDArray[np.float64]:
    """Return each reward's GRPO advantage: centred on its group's mean, in units of its deviation.

    Groups are found by id, in any order. A group of one and a group with equal rewards say nothing
    about which answer was better: exactly 0. Rewards ``[1, 0, 0, 1]`` of one group give
    ``[0.866, -0.866, -0.866, 0.866]``.

    Args:
        rewards: ``[N]`` one per sequence.
        group_ids: ``[N]`` group of each.
        divide_by_std: False leaves the centred reward (Dr. GRPO).

    Returns:
        ``[N]`` float64.

    Raises:
        ValueError: If the lengths differ, or a reward is not finite.

    Source: DeepSeekMath (arXiv:2402.03300) with verl's unbiased deviation; Dr. GRPO (arXiv:2503.20783).
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) != len(group_ids):
        raise ValueError(f"{len(values)} rewards but {len(group_ids)} group ids: give one id per reward")
    if not np.isfinite(values).all():
        raise ValueError(
            f"rewards hold {values[~np.isfinite(values)][0]}: every reward must be finite; raise instead"
        )
    numbers: dict[str, int] = {}
    group = np.fromiter((numbers.setdefault(name, len(numbers)) for name in group_ids), np.int64, len(values))
    size = np.bincount(group)
    centred = values - (np.bincount(group, weights=values) / np.maximum(size, 1))[group]
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    centred[(low == high)[group]] = 0.0  # the mean of equal floats need not equal them
    if divide_by_std:
        variance = np.bincount(group, weights=centred**2) / np.maximum(size - 1, 1)
        centred /= np.sqrt(variance)[group] + STD_FLOOR
    return centred
