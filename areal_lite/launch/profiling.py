"""Profiles of chosen steps; steps side by side come into one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class StepProfiler:
    """Writes ``steps_FIRST-LAST.json``, traces for Perfetto or chrome://tracing; ranks but the first add their number.

    Used as a context manager around all steps it also writes a trace that is still open at their end: torch takes
    down a process that leaves one open.

    Args:
        steps: The steps to profile.
        folder: Made when the first trace is written.
    """

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        self._steps = set(steps)
        self._folder = folder
        self._first = self._last = 0
        self._profile: Any = None

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Profile what happens inside if ``step`` is one of those chosen."""
        if step in self._steps:
            self._last = step
            if self._profile is None:
                from torch.profiler import profile

                self._first = step
                self._profile = profile(record_shapes=True)
                self._profile.start()
        goes_on = False
        try:
            yield
            goes_on = step + 1 in self._steps
        finally:
            if not goes_on:
                self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        rank = os.environ.get("RANK", "0")
        name = f"steps_{self._first}-{self._last}{f'.rank{rank}' if rank != '0' else ''}.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._folder / name))
