"""Discounted sums along each episode, without a Python loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.errors import ConfigError


def check_discount(discount: float, unit: str) -> None:
    """Raise a ConfigError unless the discount per ``unit`` (token, turn) lies in 0 to 1."""
    if not 0 <= discount <= 1:
        raise ConfigError(f"trainer.advantage_kwargs: the discount per {unit} is {discount}: use 0 to 1")


def discounted_sums(values: Tensor, episodes: Tensor, discount: float) -> Tensor:
    """Return each token's value plus the discounted values after it in its episode.

    Each pass doubles the reach of a sum, so an episode of ``L`` tokens takes ``log2(L)`` passes over the tensor, and
    rounding errors grow with that many additions. Values ``[1, 1, 1, 5]`` of episodes ``[0, 0, 0, 1]`` with a
    discount of 0.5 give ``[1.75, 1.5, 1, 5]``.

    Args:
        values: ``[T]`` float.
        episodes: ``[T]`` int64, episode of each token; the tokens of an episode are adjacent.
        discount: Per token (gamma, or gamma * lam), from 0 to 1.

    Returns:
        ``[T]``, dtype of ``values``.

    Raises:
        ConfigError: If the discount is outside 0 to 1.
    """
    check_discount(discount, "token")
    sums = values.clone()
    longest = int(torch.bincount(episodes).max()) if len(episodes) else 0
    reach = 1
    while reach < longest:
        # where, not a product: a NaN or inf must stay in its episode.
        later = torch.where(episodes[reach:] == episodes[:-reach], sums[reach:], 0.0)
        sums[:-reach].add_(later, alpha=discount**reach)
        reach *= 2
    return sums


def next_values(values: Tensor, episodes: Tensor) -> Tensor:
    """Return ``[T]``, the value of the next token of the same episode; 0 at an episode's end."""
    result = torch.zeros_like(values)
    result[:-1] = torch.where(episodes[1:] == episodes[:-1], values[1:], 0.0)
    return result
