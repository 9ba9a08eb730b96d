"""Penalties in the reward: the KL to a reference, with its fixed or adapted coefficient, and DAPO's for long answers.

A step's KL penalty uses the coefficient from before the step; the caller updates it afterwards.
"""

from __future__ import annotations

from torch import Tensor

from areal_lite.errors import ConfigError
from areal_lite.trainer.objectives.aggregation import token_weights

MAX_RELATIVE_ERROR = 0.2  # bound on the relative error of the KL in one update


def adapted_coef(coef: float, current_kl: float, num_episodes: int, *, target: float, horizon: float) -> float:
    """Return the coefficient of the KL penalty after a step: higher if the step's :func:`mean_kl` was above the target
    (nats per token), else lower, over ``horizon`` episodes. Source: Ziegler et al. (arXiv:1909.08593)."""
    error = min(max(current_kl / target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coef * (1 + error * num_episodes / horizon)


def mean_kl(kl: Tensor, episodes: Tensor) -> float:
    """Return the mean over episodes of their mean ``kl [T]`` (nats per token); episodes without tokens do not count."""
    return (kl * token_weights("seq-mean-token-mean", episodes)).sum().item()


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Return ``[E]`` float32, the penalty on answers of ``lengths [E]`` tokens: 0 up to the buffer, then linear to -1
    at the limit. With ``max_length=10, buffer=4`` lengths ``[6, 8, 10, 12]`` give ``[0, -0.5, -1, -1]``. Source: DAPO
    (arXiv:2503.14476)."""
    if not 1 <= buffer <= max_length:
        raise ConfigError(f"overlong buffer is {buffer}: choose 1 to {max_length} tokens, the max_length")
    return ((max_length - buffer - lengths).float() / buffer).clamp(-1.0, 0.0)
