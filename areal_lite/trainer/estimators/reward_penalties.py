"""Penalties in the reward: the KL to a reference, with its fixed or adapted coefficient, and DAPO's for long answers.

A step's KL penalty uses the coefficient from before the step; the caller updates it afterwards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from areal_lite.errors import ConfigError

MAX_RELATIVE_ERROR = 0.2
"""Bound on the relative error of the KL in one update."""


class KLController:
    """A coefficient that rises while the KL is above its target (nats per token) and falls while below, over
    ``horizon`` episodes; constant without a target. Source: Ziegler et al. (arXiv:1909.08593)."""

    def __init__(self, coef: float, *, target: float | None = None, horizon: float = 10000.0) -> None:
        for name, value in (("target", target), ("horizon", horizon)):
            if value is not None and not value > 0:
                raise ConfigError(f"trainer.kl.{name} is {value}: it must be above 0")
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, num_episodes: int) -> None:
        """Scale the coefficient by ``1 + error * num_episodes / horizon``, given a step's :func:`mean_kl`."""
        if self.target is None:
            return
        if not math.isfinite(current_kl):
            raise ValueError(
                f"the step's KL is {current_kl}: it must be finite, or the coefficient of all later steps is not"
            )
        error = min(max(current_kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.coef *= 1 + error * num_episodes / self.horizon

    def state(self) -> dict[str, float]:
        """Return the state that a resumed run needs, as JSON."""
        return {} if self.target is None else {"coef": self.coef}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore the saved coefficient; keep the config's if it is constant or none was saved."""
        if self.target is not None:
            self.coef = state.get("coef", self.coef)


def kl_in_reward(token_rewards: Tensor, kl: Tensor, coef: float) -> Tensor:
    """Return ``[T]``, each token's reward minus its penalty ``coef * kl``; ``kl [T]`` in nats."""
    return token_rewards - coef * kl


def mean_kl(kl: Tensor, episodes: Tensor) -> float:
    """Return the mean over episodes of their mean ``kl [T]`` (nats per token); episodes without tokens do not count."""
    counts = torch.bincount(episodes)
    means = torch.bincount(episodes, weights=kl.double()) / counts
    return means[counts > 0].mean().item() if len(episodes) else 0.0


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Return ``[E]`` float32, the penalty on answers of ``lengths [E]`` tokens: 0 up to the buffer, then linear to -1
    at the limit. With ``max_length=10, buffer=4`` lengths ``[6, 8, 10, 12]`` give ``[0, -0.5, -1, -1]``. Source: DAPO
    (arXiv:2503.14476)."""
    if not 1 <= buffer <= max_length:
        raise ConfigError(f"overlong buffer is {buffer}: choose 1 to {max_length} tokens, the max_length")
    return ((max_length - buffer - lengths).float() / buffer).clamp(-1.0, 0.0)
