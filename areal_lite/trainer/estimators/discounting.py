"""Discounted sums along each row, without a Python loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.errors import ConfigError


def discounted_sums(values: Tensor, rows: Tensor, discount: float) -> Tensor:
    """Return each token's value plus what follows it in its row, ``discount`` less per token.

    Each pass doubles how far a sum reaches, so rows of ``L`` tokens take ``log2(L)`` passes over the tensor, and
    rounding errors grow with that many additions. Values ``[1, 1, 1, 5]`` of rows ``[0, 0, 0, 1]`` at a discount
    of 0.5 give ``[1.75, 1.5, 1, 5]``.

    Args:
        values: ``[T]`` float.
        rows: ``[T]`` int64; the tokens of a row stand together.
        discount: Per token, from 0 to 1.

    Returns:
        ``[T]``, dtype of ``values``.

    Raises:
        ConfigError: If the discount is none.
    """
    if not 0 <= discount <= 1:
        raise ConfigError(
            f"trainer.advantage_kwargs: gamma and lam discount by {discount} a token: use 0 to 1"
        )
    sums = values.clone()
    longest = int(torch.bincount(rows).max()) if len(rows) else 0
    reach = 1
    while reach < longest:
        # where, not a product: a number that is not finite must stay in its row.
        further = torch.where(rows[reach:] == rows[:-reach], sums[reach:], 0.0)
        sums[:-reach].add_(further, alpha=discount**reach)
        reach *= 2
    return sums


def following(values: Tensor, rows: Tensor) -> Tensor:
    """Return ``[T]`` the value of the next token of the same row; 0 at a row's end."""
    result = torch.zeros_like(values)
    result[:-1] = torch.where(rows[1:] == rows[:-1], values[1:], 0.0)
    return result
