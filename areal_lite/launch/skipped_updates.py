"""Updates that were not finite and so not applied: one JSON line each in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_lite.errors import StorageError

SKIPPED_UPDATES = "skipped_updates.jsonl"


def note_skipped(run_dir: Path) -> Callable[[dict[str, Any]], None]:
    """Return what a trainer tells of an update it skips."""

    def note(update: dict[str, Any]) -> None:
        # JSON has no word for what is not finite.
        told = {name: str(value) if isinstance(value, float) else value for name, value in update.items()}
        try:
            with (run_dir / SKIPPED_UPDATES).open("a") as file:
                file.write(json.dumps(told) + "\n")
        except OSError as error:
            raise StorageError(
                f"{run_dir / SKIPPED_UPDATES} cannot be written: {error}: free disk space"
            ) from error

    return note
