"""Means, deviations and ranges of values by group, and normalization over tokens.

Sums are float64 and variances take two passes, so that 10000.1 and 10000.2 keep their difference. The mean of equal
values is that value to the last bit, so a group of one and a group of equal values deviate by exactly 0; nothing is
divided by a deviation of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Level = Literal["none", "group", "batch"]
VARIANCE_FLOOR = 1e-8  # added to a variance before taking its root, as in verl


@dataclass(frozen=True, slots=True)
class Grouping:
    """The group of each of ``K`` values, among ``G`` groups."""

    group: Tensor  # ``[K]`` int64
    size: Tensor  # ``[G]`` int64, number of values in each group

    @classmethod
    def numbered(cls, group: Tensor) -> Grouping:
        """Make a grouping from group numbers ``[K]`` int64, 0 or more."""
        return cls(group, torch.bincount(group))

    @classmethod
    def by_id(cls, group_ids: Sequence[str], device: torch.device) -> Grouping:
        """Make a grouping from ids, numbered in the order of their first appearance."""
        numbers: dict[str, int] = {}
        group = [numbers.setdefault(name, len(numbers)) for name in group_ids]
        return cls.numbered(torch.tensor(group, dtype=torch.int64, device=device))

    def sums(self, values: Tensor) -> Tensor:
        """Return ``[G]`` float64, the sum of each group's values."""
        sums = torch.zeros(len(self.size), dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self.group, values.double())

    def means(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return ``[G]`` float64, the mean of each group's values, weighted by ``weights [K]`` (0 or more)."""
        total = self.sums(values if weights is None else values * weights)
        means = total / (self.size if weights is None else self.sums(weights))
        low, high = self.ranges(values)
        return torch.where(low == high, low, means)

    def ranges(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[G]`` and ``[G]``, the smallest and the largest value of each group; 0 in an empty one."""
        empty = torch.zeros(len(self.size), dtype=values.dtype, device=values.device)
        low = empty.scatter_reduce(0, self.group, values, "amin", include_self=False)
        return low, empty.scatter_reduce(0, self.group, values, "amax", include_self=False)

    def varies(self, values: Tensor) -> Tensor:
        """Return ``[G]`` bool, False where all values of a group are equal."""
        low, high = self.ranges(values)
        return low != high

    def centred(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return ``[K]`` float64, values minus their group's mean; ``weights`` as in :meth:`means`."""
        return values - self.spread(self.means(values, weights))

    def deviations(self, centred: Tensor) -> Tensor:
        """Return ``[G]`` float64, the unbiased standard deviation of each group; 0 in a group of one."""
        return (self.sums(centred.square()) / (self.size - 1).clamp(min=1)).sqrt()

    def spread(self, group_values: Tensor) -> Tensor:
        """Return ``[K]``, the entry of ``group_values [G]`` for each value's group."""
        return group_values.index_select(0, self.group)


def normalize_advantages(
    advantages: Tensor, episodes: Tensor, group_ids: Sequence[str], *, mean: Level = "none", std: Level = "none"
) -> Tensor:
    """Return advantages ``[T]`` minus a mean and divided by an unbiased deviation around its own mean, each over the
    tokens of nothing, the token's group, or the batch. ``episodes [T]`` int64, ``group_ids [E]``."""
    by_group = Grouping.by_id(group_ids, episodes.device).group.index_select(0, episodes)
    groupings = {"batch": Grouping.numbered(torch.zeros_like(episodes)), "group": Grouping.numbered(by_group)}
    result = advantages.double() if mean == "none" else groupings[mean].centred(advantages)
    if std != "none":
        grouping = groupings[std]
        variances = grouping.deviations(grouping.centred(advantages)).square()
        result = result * grouping.spread(torch.where(variances > 0, (variances + VARIANCE_FLOOR).rsqrt(), 1.0))
    return result.to(advantages.dtype)


def whiten(values: Tensor) -> Tensor:
    """Return ``[T]`` values scaled to mean 0 and deviation 1 over the batch; exactly 0 if all are equal."""
    one_group = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    return normalize_advantages(values, one_group, [""], mean="batch", std="batch")
