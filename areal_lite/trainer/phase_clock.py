"""Seconds by phase of one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from areal_lite.trainer.data_metrics import timing_metrics


class PhaseClock:
    """Sums up seconds by phase; on a GPU a phase ends when its work is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    def metrics(self, *, num_tokens: int) -> dict[str, float]:
        """Return seconds and milliseconds per token by phase, and tokens per second since the clock was made."""
        return timing_metrics(self._seconds, time.perf_counter() - self._began, num_tokens=num_tokens)
