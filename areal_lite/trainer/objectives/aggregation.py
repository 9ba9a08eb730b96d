"""From losses per token to the loss of an optimizer update: one weight per token, then a weighted sum.

The weights contain all averaging, so the sum over micro-batches and ranks is the loss of the update however it was cut.
Where gradients are averaged over ranks, multiply the loss by their number."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor


def index_episodes(episodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[T]``, each token's episode numbered from 0, and ``[E]``, the tokens of each episode."""
    _, index, counts = torch.unique(episodes, return_inverse=True, return_counts=True)
    return index, counts


def episode_sum(values: Tensor, episodes: Tensor) -> Tensor:
    """Return ``[T]``, the sum of ``values`` over the token's episode."""
    return _reduce(values, episodes, "sum")


def episode_mean(values: Tensor, episodes: Tensor) -> Tensor:
    """Return ``[T]``, the mean of ``values`` over the token's episode."""
    return _reduce(values, episodes, "mean")


def episode_max(values: Tensor, episodes: Tensor) -> Tensor:
    """Return ``[T]``, the largest of ``values`` in the token's episode."""
    return _reduce(values, episodes, "amax")


def _reduce(values: Tensor, episodes: Tensor, how: str) -> Tensor:
    index, counts = index_episodes(episodes)
    per_episode = values.new_zeros(len(counts)).scatter_reduce(0, index, values, how, include_self=False)
    return per_episode[index]


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Losses of single tokens (or pairs), not yet summed."""

    losses: Tensor
    """``[T]``; carries gradient."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Each ``[T]``, without gradient; the metric of that name is the mean over the update's tokens."""
    chosen: Tensor | None = None
    """``[T]`` bool, the tokens chosen by a loss that chooses among a whole minibatch; None for other losses."""

    def __post_init__(self) -> None:
        if self.losses.ndim != 1:
            raise ValueError(f"losses are {list(self.losses.shape)}: give [T], one per token, not averaged")
        for name, values in {**self.statistics, "chosen": self.chosen}.items():
            if values is None:
                continue
            if not isinstance(values, Tensor) or values.shape != self.losses.shape:
                actual = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"{name} is {actual}: give a tensor {list(self.losses.shape)} as for losses, one for each token"
                )
        if self.chosen is not None and self.chosen.dtype != torch.bool:
            raise ValueError(f"chosen has dtype {self.chosen.dtype}: give bool, True for the chosen tokens")


class AggregationMode(StrEnum):
    """How token losses are averaged; only trained tokens count.

    The names are verl's. A "sequence" in them is an episode: the token sequences that an episode was cut into share
    its weight in proportion to their trained tokens, so the cut changes nothing.
    """

    TOKEN_MEAN = "token-mean"
    """Every token counts the same (DAPO, arXiv:2503.14476)."""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """Sum over an episode, mean over episodes."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """Every episode counts the same, however long (GRPO, arXiv:2402.03300)."""
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """Sum over all tokens, divided by a constant length (Dr. GRPO, arXiv:2503.20783)."""


def token_weights(
    mode: AggregationMode,
    episodes: Tensor,
    *,
    num_tokens: int | None = None,
    num_episodes: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``[T]`` float64, the weight of each token's loss in the loss of one optimizer update of ``episodes [T]``.
    Episodes of 1 and 3 tokens under seq-mean-token-mean give ``[1/2, 1/6, 1/6, 1/6]``. To leave tokens out, pass the
    episodes of the others only. ``scale``, in tokens, divides in seq-mean-token-sum-norm; None: the length of the
    longest episode."""
    index, counts = index_episodes(episodes)
    num_tokens = len(episodes) if num_tokens is None else num_tokens
    num_episodes = len(counts) if num_episodes is None else num_episodes
    if num_tokens < len(episodes) or num_episodes < len(counts):
        raise ValueError(
            f"num_tokens is {num_tokens} and num_episodes {num_episodes}, but there are {len(episodes)} tokens of "
            f"{len(counts)} episodes here: count over all micro-batches and ranks of the update"
        )
    if scale is not None and scale <= 0:
        raise ValueError(f"scale is {scale}: it divides the loss and must be above 0")
    if not len(episodes):
        return torch.zeros(0, dtype=torch.float64, device=episodes.device)
    ones = torch.ones(len(episodes), dtype=torch.float64, device=episodes.device)
    match mode:
        case AggregationMode.TOKEN_MEAN:
            return ones / num_tokens
        case AggregationMode.SEQ_MEAN_TOKEN_SUM:
            return ones / num_episodes
        case AggregationMode.SEQ_MEAN_TOKEN_MEAN:
            return ones / counts[index] / num_episodes
        case AggregationMode.SEQ_MEAN_TOKEN_SUM_NORM:
            return ones / (counts.max() if scale is None else scale)


def aggregate(losses: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum(weights * losses)`` as a scalar, to be summed over micro-batches and ranks. A token of weight 0 is
    left out: not even a NaN there reaches the sum. Without tokens the result can be backpropagated, so that a rank
    without work still takes part in the gradient reduction."""
    if losses.shape != weights.shape:
        raise ValueError(f"losses are {list(losses.shape)}, weights {list(weights.shape)}: give as many")
    weights = weights.to(losses.dtype)
    return torch.where(weights != 0, losses * weights, 0.0).sum()
