"""Metrics of runs with rollouts: what the engine counts, and the record of a run without training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.trainer.metrics import MetricsWriter

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


@contextmanager
def recorded(engine: RemoteInfEngine, run_dir: Path, name: str, on_step: OnStep | None) -> Iterator[dict[str, float]]:
    """Append one record to ``NAME_metrics.jsonl`` when the context ends, also after an error.

    It has the engine's metrics and those that the context puts into the yielded dict. The file is not metrics.jsonl,
    because the folder may hold a training run.
    """
    metrics: dict[str, float] = {}
    began = time.monotonic()
    try:
        yield metrics
    finally:
        metrics = {f"{name}/seconds": time.monotonic() - began} | engine_metrics(engine) | metrics
        record = with_scalars(metrics, engine.take_scalars() | engine.take_scalars(is_eval=True))
        with MetricsWriter(run_dir, name=f"{name}_metrics.jsonl") as writer:
            writer.write(0, record)
        if on_step is not None:
            on_step(0, record)
