"""Metrics of runs with rollouts: what the engine counts and what episodes recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from areal_lite.rollout.remote_inf_engine import RemoteInfEngine

logger = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, float]], None]
"""Called with the step (0 before training) and its metrics."""


def engine_metrics(engine: RemoteInfEngine) -> dict[str, float]:
    """Return the engine's totals: groups by status, failures, pacing, servers."""
    return {
        **{f"episodes/{status}": float(count) for status, count in engine.export_stats().items()},
        **{f"rollout/{name}": value for name, value in engine.rollout_metrics().items()},
        **{f"servers/{name}": value for name, value in engine.server_metrics().items()},
    }


def with_scalars(metrics: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the run's metrics with the numbers that episodes recorded; a name of the run's own stays the run's."""
    if taken := sorted(metrics.keys() & scalars.keys()):
        logger.warning("episodes recorded %s, which are metrics of the run: use other names", ", ".join(taken))
    return {**scalars, **metrics}
