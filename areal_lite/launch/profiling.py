"""Profiles of chosen steps; steps side by side come into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class StepProfiler:
    """Writes ``steps_FIRST-LAST.json``, traces for Perfetto or chrome://tracing.

    Args:
        steps: The steps to profile.
        folder: Made when the first trace is written.
    """

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        self._steps = set(steps)
        self._folder = folder
        self._first = 0
        self._profile: Any = None

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Profile what happens inside if ``step`` is one of those chosen."""
        if step in self._steps and self._profile is None:
            from torch.profiler import profile

            self._first = step
            self._profile = profile(record_shapes=True)
            self._profile.start()
        try:
            yield
        finally:
            if self._profile is not None and step + 1 not in self._steps:
                self._profile.stop()
                self._folder.mkdir(parents=True, exist_ok=True)
                self._profile.export_chrome_trace(str(self._folder / f"steps_{self._first}-{step}.json"))
                self._profile = None
