"""From losses per token to the loss of an optimizer update: one weight per token, then a weighted sum.

The weights contain all averaging, so the sum over micro-batches and ranks is the loss of the update however it was cut.
Where gradients are averaged over ranks, multiply the loss by their number."""

from dataclasses import dataclass, field
from functools import partial
import torch
from torch import Tensor
from areal_lite.config.trainer_config import AggregationMode


def index_episodes(episodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[T]``, each token's episode numbered from 0, and ``[E]``, the tokens of each episode."""
    _, index, counts = torch.unique(episodes, return_inverse=True, return_counts=True)
    return index, counts


def _reduce(values: Tensor, episodes: Tensor, how: str) -> Tensor:
    """Return ``[T]``, the sum, mean or largest of ``values`` in the token's episode."""
    index, counts = index_episodes(episodes)
    return values.new_zeros(len(counts)).scatter_reduce(0, index, values, how, include_self=False)[index]


episode_sum, episode_mean, episode_max = (partial(_reduce, how=how) for how in ("sum", "mean", "amax"))


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Losses of single tokens (or pairs), not yet summed."""

    losses: Tensor
    """``[T]``; carries gradient."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Each ``[T]``, without gradient; the metric of that name is the mean over the update's tokens."""
    chosen: Tensor | None = None
    """``[T]`` bool, the tokens chosen by a loss that chooses among a whole minibatch; None for other losses."""


def token_weights(mode: AggregationMode, episodes: Tensor, *, scale: float | None = None) -> Tensor:
    """Return ``[T]`` float64, the weight of each token's loss in the loss of one optimizer update of ``episodes [T]``.
    Episodes of 1 and 3 tokens under seq-mean-token-mean give ``[1/2, 1/6, 1/6, 1/6]``. To leave tokens out, pass the
    episodes of the others only. ``scale``, in tokens, divides in seq-mean-token-sum-norm."""
    index, counts = index_episodes(episodes)
    ones = torch.ones(len(episodes), dtype=torch.float64, device=episodes.device)
    match mode:
        case "token-mean":
            return ones / len(episodes)
        case "seq-mean-token-sum":
            return ones / len(counts)
        case "seq-mean-token-mean":
            return ones / counts[index] / len(counts)
        case "seq-mean-token-sum-norm":
            assert scale is not None
            return ones / scale


def aggregate(losses: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum(weights * losses)`` as a scalar, to be summed over micro-batches and ranks. A token of weight 0 is
    left out: not even a NaN there reaches the sum. Without tokens it still has a gradient."""
    weights = weights.to(losses.dtype)
    return torch.where(weights != 0, losses * weights, 0.0).sum()
