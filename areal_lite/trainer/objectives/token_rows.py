"""Sums and means over the tokens of a row (one sequence), given back to each of its tokens.

``rows [T]`` says which row a token is of; the numbers need be neither dense nor sorted.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[T]`` each token's row counted from 0, and ``[R]`` the tokens in each row."""
    _, index, counts = torch.unique(rows, return_inverse=True, return_counts=True)
    return index, counts


def row_sum(values: Tensor, rows: Tensor) -> Tensor:
    """Return ``[T]`` the sum of ``values`` over the token's row."""
    return _reduce(values, rows, "sum")


def row_mean(values: Tensor, rows: Tensor) -> Tensor:
    """Return ``[T]`` the mean of ``values`` over the token's row."""
    return _reduce(values, rows, "mean")


def row_max(values: Tensor, rows: Tensor) -> Tensor:
    """Return ``[T]`` the largest of ``values`` in the token's row."""
    return _reduce(values, rows, "amax")


def _reduce(values: Tensor, rows: Tensor, how: str) -> Tensor:
    index, counts = index_rows(rows)
    per_row = values.new_zeros(len(counts)).scatter_reduce(0, index, values, how, include_self=False)
    return per_row[index]
