"""The coefficient of a KL penalty in the reward: fixed, or adapted to a target.

A step's penalty is taken with the coefficient as it was; updating it afterwards is the caller's part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from areal_lite.errors import ConfigError

MAX_RELATIVE_ERROR = 0.2
"""A KL further from its target counts as this far."""


class KLController:
    """A coefficient that rises while the KL is above its target and falls while below; without a target it stays.

    Args:
        coef: At the start.
        target: KL, nats per token.
        horizon: Sequences over which the coefficient adapts.

    Raises:
        ConfigError: If target or horizon is not above 0.

    Source: Ziegler et al. (arXiv:1909.08593).
    """

    def __init__(self, coef: float, *, target: float | None = None, horizon: float = 10000.0) -> None:
        for name, value in (("target", target), ("horizon", horizon)):
            if value is not None and not value > 0:
                raise ConfigError(f"trainer.kl.{name} is {value}: it must be above 0")
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, num_rows: int) -> None:
        """Scale the coefficient by ``1 + error * num_rows / horizon``, given a step's :func:`mean_kl`.

        Raises:
            ValueError: If the KL is not finite; the coefficient stays.
        """
        if self.target is None:
            return
        if not math.isfinite(current_kl):
            raise ValueError(
                f"the step's KL is {current_kl}: it must be finite, or no later step has a coefficient"
            )
        error = min(max(current_kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.coef *= 1 + error * num_rows / self.horizon

    def state(self) -> dict[str, float]:
        """Return what a resumed run needs, as JSON."""
        return {} if self.target is None else {"coef": self.coef}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue with the saved coefficient; where none adapts or none was saved, the config's stays."""
        if self.target is not None:
            self.coef = state.get("coef", self.coef)


def kl_in_reward(token_rewards: Tensor, kl: Tensor, coef: float) -> Tensor:
    """Return ``[T]`` rewards less the penalty of each token; ``kl [T]`` in nats."""
    return token_rewards - coef * kl


def mean_kl(kl: Tensor, rows: Tensor) -> float:
    """Return the mean over rows of each row's mean ``kl [T]`` (nats per token); rows without tokens do not count."""
    counts = torch.bincount(rows)
    means = torch.bincount(rows, weights=kl.double()) / counts
    return means[counts > 0].mean().item() if len(rows) else 0.0
