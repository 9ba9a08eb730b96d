"""The critic's loss per token."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.trainer.objectives.aggregation import LossTerms


def value_loss(
    values: Tensor, proximal_values: Tensor, returns: Tensor, *, clip: float | None = None
) -> LossTerms:
    """Return half the squared error of each token's value, with the values clipped around their proximal values.

    The loss is the larger of the errors of the free and of the clipped value, so there is no gain in leaving the band.

    Args:
        values: ``[T]`` predictions of the weights being trained; carries gradient.
        proximal_values: ``[T]`` predictions at the start of the step.
        returns: ``[T]`` targets.
        clip: Half-width of the band, in units of reward. None: no clipping.

    Returns:
        Losses ``[T]``; statistic ``value_clip_fraction``, 1 where the clipped value had the larger error.

    Source: PPO's reference code (arXiv:1707.06347; arXiv:2005.12729 measures the effect of clipping).
    """
    error = (values - returns).square()
    clipped_error = error
    if clip is not None:
        clipped = torch.clamp(values, proximal_values - clip, proximal_values + clip)
        clipped_error = (clipped - returns).square()
    statistics = {"value_clip_fraction": (clipped_error > error).to(values.dtype)}
    return LossTerms(torch.maximum(error, clipped_error) / 2, statistics)
