"""metrics.jsonl: one JSON object per training step, and TensorBoard events where asked."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from areal_lite.errors import ConfigError


class MetricsWriter:
    """Appends records to ``run_dir/metrics.jsonl``; each line is one write, so a reader sees whole lines.

    Args:
        run_dir: Folder of the run.
        last_step: Records beyond this step are removed: they are about to be written again.
        tensorboard: Write TensorBoard events as well.

    Raises:
        ConfigError: If ``tensorboard`` is asked for but not installed.
    """

    def __init__(
        self, run_dir: Path | str, *, last_step: int | None = None, tensorboard: bool = False
    ) -> None:
        self._events: Any = None
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(
                    "tensorboard is true but the package is not installed: "
                    "pip install 'areal-lite[tensorboard]', or set tensorboard: false"
                ) from error
            self._events = SummaryWriter(str(run_dir / "tensorboard"))
        path = run_dir / "metrics.jsonl"
        if last_step is not None and path.exists():
            _cut_off(path, last_step)
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step": step, "time": seconds since the epoch, **metrics}``; non-finite values become null."""
        record: dict[str, float | None] = {"step": step, "time": round(time.time(), 3)}
        for name, value in metrics.items():
            record[name] = float(value) if math.isfinite(value) else None
            if self._events is not None:
                self._events.add_scalar(name, value, step)
        self._file.write(json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cut_off(path: Path, last_step: int) -> None:
    """Keep the whole records up to ``last_step``."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:  # the end of a run that was killed
            continue
        if record["step"] <= last_step and line.endswith(b"\n"):
            kept.append(line)
    aside = path.with_name(path.name + ".tmp")
    aside.write_bytes(b"".join(kept))
    aside.replace(path)
