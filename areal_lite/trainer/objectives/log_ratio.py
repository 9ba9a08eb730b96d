"""The log of how much likelier one policy makes a token than another."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats. Log-ratios are held to this before exp, so that no ratio overflows: exp(20) is 5e8."""


def clamped_log_ratio(over: Tensor, under: Tensor) -> Tensor:
    """Return ``[T]`` ``over - under`` in nats, held to ``+-MAX_LOG_RATIO``; beyond it no gradient flows."""
    return (over - under).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
