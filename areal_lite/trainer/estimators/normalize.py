"""Normalization over tokens, per group or over the batch.

Values that are all equal (a single one included) become exactly 0 when centred; nothing is divided by a deviation
of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from areal_lite.trainer.estimators.grouping import Grouping

Level = Literal["none", "group", "batch"]

VARIANCE_FLOOR = 1e-8
"""Added to a variance before taking its root, as in verl."""


def normalize_advantages(
    advantages: Tensor,
    episodes: Tensor,
    group_ids: Sequence[str],
    *,
    mean: Level = "none",
    std: Level = "none",
) -> Tensor:
    """Return advantages minus a mean and divided by a standard deviation, both over tokens.

    Args:
        advantages: ``[T]`` float.
        episodes: ``[T]`` int64, episode of each token.
        group_ids: ``[E]`` group of each episode.
        mean: Subtract nothing, the mean of the token's group, or the mean of the batch.
        std: Divide by nothing, or by the unbiased deviation of the group or the batch around its own mean.

    Returns:
        ``[T]``, dtype of ``advantages``.
    """
    centred = {"none": advantages.double()}
    if "batch" in (mean, std):
        centred["batch"] = _centred(advantages)
    if "group" in (mean, std):
        groups = Grouping.numbered(Grouping.by_id(group_ids, episodes.device).group.index_select(0, episodes))
        centred["group"] = groups.centred(advantages)

    result = centred[mean]
    if std == "batch":
        result = result * _scale(_variance(centred["batch"]))
    elif std == "group":
        result = result * groups.spread(_scale(groups.deviations(centred["group"]).square()))
    return result.to(advantages.dtype)


def whiten(values: Tensor) -> Tensor:
    """Return ``[T]`` values scaled to mean 0 and deviation 1 over the batch; exactly 0 if all are equal."""
    centred = _centred(values)
    return (centred * _scale(_variance(centred))).to(values.dtype)


def _centred(values: Tensor) -> Tensor:
    if not len(values) or values.min() == values.max():
        return torch.zeros_like(values, dtype=torch.float64)
    return values - values.mean(dtype=torch.float64)


def _variance(centred: Tensor) -> Tensor:
    return centred.square().sum() / max(len(centred) - 1, 1)


def _scale(variances: Tensor) -> Tensor:
    return torch.where(variances > 0, (variances + VARIANCE_FLOOR).rsqrt(), 1.0)
