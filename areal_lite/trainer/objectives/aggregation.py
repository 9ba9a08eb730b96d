"""From losses per token to the loss of an optimizer update: one weight per token, then a sum.

The weights hold every mean there is, so the sum over micro-batches and ranks is the loss of the
update however it was cut. A mean over ranks afterwards would divide twice: where gradients are
averaged, multiply the loss by the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from areal_lite.trainer.objectives.token_rows import index_rows


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Losses of single tokens (or pairs), not yet summed.

    Raises:
        ValueError: If a shape differs.
    """

    losses: Tensor
    """``[T]`` carries gradient."""

    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Each ``[T]``, without gradient; the mean over the update's tokens is the metric of that name."""

    chosen: Tensor | None = None
    """``[T]`` bool, what a loss chose that chooses among the tokens of a whole minibatch; None for any other loss."""

    def __post_init__(self) -> None:
        if self.losses.ndim != 1:
            raise ValueError(
                f"losses are {list(self.losses.shape)}: give [T], one for each token, not averaged"
            )
        for name, values in {**self.statistics, "chosen": self.chosen}.items():
            if values is None:
                continue
            if not isinstance(values, Tensor) or values.shape != self.losses.shape:
                found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"{name} is {found}: give a tensor {list(self.losses.shape)} as for losses, one for each token"
                )
        if self.chosen is not None and self.chosen.dtype != torch.bool:
            raise ValueError(
                f"chosen is of {self.chosen.dtype}: give bool, True for the tokens that are chosen"
            )


class AggregationMode(StrEnum):
    """How much a token counts. A row is one sequence; only trained tokens are ever counted."""

    TOKEN_MEAN = "token-mean"
    """Every token the same (DAPO, arXiv:2503.14476)."""

    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """Sum over a row, mean over rows."""

    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """Every row the same, however long (GRPO, arXiv:2402.03300)."""

    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """Sum over all tokens, divided by a constant length (Dr. GRPO, arXiv:2503.20783)."""


def token_weights(
    mode: AggregationMode,
    rows: Tensor,
    *,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return how much each token's loss counts in the loss of one optimizer update.

    Rows of 1 and 3 tokens under seq-mean-token-mean give ``[1/2, 1/6, 1/6, 1/6]``. Tokens that a
    rejection took out are given to no weight: pass the rows of the kept ones.

    Args:
        mode: How tokens and rows are averaged.
        rows: ``[T]`` int, the row of each token; whole rows.
        num_tokens: Trained tokens of the update over all micro-batches and ranks. None: ``rows`` is
            the whole update, as for the next two.
        num_rows: Rows with a trained token in it.
        scale: Tokens, the divisor of seq-mean-token-sum-norm. None: the longest row.

    Returns:
        ``[T]`` float64.

    Raises:
        ValueError: If ``rows`` holds more than the counts say, or ``scale`` is not above 0.
    """
    index, counts = index_rows(rows)
    num_tokens = len(rows) if num_tokens is None else num_tokens
    num_rows = len(counts) if num_rows is None else num_rows
    if num_tokens < len(rows) or num_rows < len(counts):
        raise ValueError(
            f"num_tokens is {num_tokens} and num_rows {num_rows}, but rows alone holds {len(rows)} tokens of "
            f"{len(counts)} rows: count over all micro-batches and ranks of the update"
        )
    if scale is not None and scale <= 0:
        raise ValueError(f"scale is {scale}: it divides the loss and must be above 0")
    if not len(rows):
        return torch.zeros(0, dtype=torch.float64, device=rows.device)
    ones = torch.ones(len(rows), dtype=torch.float64, device=rows.device)
    match mode:
        case AggregationMode.TOKEN_MEAN:
            return ones / num_tokens
        case AggregationMode.SEQ_MEAN_TOKEN_SUM:
            return ones / num_rows
        case AggregationMode.SEQ_MEAN_TOKEN_MEAN:
            return ones / counts[index] / num_rows
        case AggregationMode.SEQ_MEAN_TOKEN_SUM_NORM:
            return ones / (counts.max() if scale is None else scale)


def aggregate(losses: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum(weights * losses)`` as a scalar of the losses' dtype, to be summed over micro-batches and ranks.

    A token of weight 0 is left out: not even a NaN there reaches the sum. No tokens give a 0 that
    can be backpropagated, so that a rank without work still takes part in the gradient's reduction.

    Args:
        losses: ``[T]`` carries gradient.
        weights: ``[T]`` from :func:`token_weights`, times any correction weights.

    Raises:
        ValueError: If the shapes differ.
    """
    if losses.shape != weights.shape:
        raise ValueError(
            f"losses are {list(losses.shape)}, weights {list(weights.shape)}: give one weight per loss"
        )
    weights = weights.to(losses.dtype)
    return torch.where(weights != 0, losses * weights, 0.0).sum()
