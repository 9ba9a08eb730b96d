"""Profiles of chosen steps; consecutive steps share one trace."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self


class StepProfiler:
    """Writes ``steps_FIRST-LAST.json`` for Perfetto or chrome://tracing; later ranks add their number to the name.

    As a context manager around all steps, it also ends a trace that is still open at the end: torch crashes a
    process that exits with an open trace.
    """

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        self._steps = set(steps)
        self._folder = folder
        self._first = self._last = 0
        self._profile: Any = None

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Profile the block if ``step`` is one of the chosen steps."""
        if step in self._steps:
            self._last = step
            if self._profile is None:
                from torch.profiler import profile

                self._first = step
                self._profile = profile(record_shapes=True)
                self._profile.start()
        continues = False
        try:
            yield
            continues = step + 1 in self._steps
        finally:
            if not continues:
                self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
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
