"""The critic's loss per token."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.trainer.objectives.aggregation import LossTerms


def value_loss(
    values: Tensor, proximal_values: Tensor, returns: Tensor, *, clip: float | None = None
) -> LossTerms:
    """Return half the squared error of each token's value, with the values held near where they began.

    A value may leave the band around its proximal value only at a price: the loss is the larger one
    of the free and the held value.

    Args:
        values: ``[T]`` predicted by the weights being trained; carries gradient.
        proximal_values: ``[T]`` predicted at the start of the step.
        returns: ``[T]`` targets.
        clip: Half-width of the band, in units of reward. None: no band.

    Returns:
        Losses ``[T]``; statistic ``value_clip_fraction``, the tokens where the held value was the worse one.

    Source: PPO's reference code (arXiv:1707.06347; arXiv:2005.12729 measures what the band does).
    """
    error = (values - returns).square()
    held_error = error
    if clip is not None:
        held = torch.clamp(values, proximal_values - clip, proximal_values + clip)
        held_error = (held - returns).square()
    statistics = {"value_clip_fraction": (held_error > error).to(values.dtype)}
    return LossTerms(torch.maximum(error, held_error) / 2, statistics)
