"""metrics.jsonl: one JSON object per training step, also sent to the run's trackers.

Guarantees that every line is a complete record, or that the run ends with an error.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from areal_lite.errors import StorageError
from areal_lite.trainer.crash_points import crash_point
from areal_lite.trainer.tracking import Tracking


class MetricsWriter:
    """Appends records to ``run_dir/metrics.jsonl``; each line is one write, so readers see complete lines.

    Args:
        last_step: Records after this step are removed, because they will be written again.
        tracking: Also receives each record; its owner closes it.

    Raises:
        StorageError: If the file cannot be opened, or a complete line up to ``last_step`` is not a record.
    """

    def __init__(
        self, run_dir: Path | str, *, last_step: int | None = None, tracking: Tracking | None = None
    ) -> None:
        self._path = Path(run_dir) / "metrics.jsonl"
        self._tracking = tracking
        with self._disk_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if last_step is not None and self._path.exists():
                _cut_off(self._path, last_step)
            self._file = self._path.open("ab", buffering=0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step": step, "time": seconds since the epoch, **metrics}``; non-finite values become null.

        Raises:
            StorageError: If the disk is full or not writable.
        """
        record: dict[str, float | None] = {"step": step, "time": round(time.time(), 3)}
        record |= {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        rest = memoryview(json.dumps(record).encode() + b"\n")
        crash_point("metrics:before_write")
        with self._disk_errors():
            while rest:  # a full disk may take only a part of the line
                rest = rest[self._file.write(rest) :]
        crash_point("metrics:after_write")
        if self._tracking is not None:
            self._tracking.log(step, metrics)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written: {error}: free disk space or fix its permissions, then resume from "
                "the last checkpoint"
            ) from error


def _cut_off(path: Path, last_step: int) -> None:
    """Remove the records after ``last_step``, and an incomplete last line."""
    end = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError) as error:
                raise StorageError(
                    f"{path} is damaged: the line at byte {end} is not a record ({error!r}): remove the line"
                ) from None
            if step > last_step:
                break
            end += len(line)
        file.truncate(end)
