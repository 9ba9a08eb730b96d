"""Sums, means and maxima over the tokens of an episode, repeated at each of its tokens.

``episodes [T]`` is the episode of each token; the numbers need be neither dense nor sorted.
"""

from __future__ import annotations

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
