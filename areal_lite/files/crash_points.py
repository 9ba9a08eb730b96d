"""Named crash points: tests kill the process there and inspect the disk.

``AREAL_LITE_CRASH_AT=weights:after_rename:3`` kills it with SIGKILL when that point is reached for the third time (the
first without a number). Without the variable a crash point does nothing.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "AREAL_LITE_CRASH_AT"

_FOLDER_PLACES = ("before_manifest", "after_manifest", "after_rename")
CRASH_POINTS = (
    "metrics:before_write",
    "metrics:after_write",
    "checkpoint:before_model",
    "checkpoint:after_model",
    "checkpoint:after_optimizer",
    "checkpoint:after_state",
    "checkpoint:after_files",
    *(f"{kind}:{place}" for kind in ("checkpoint", "weights", "model") for place in _FOLDER_PLACES),
    "checkpoint:before_delete",
    "checkpoint:during_delete",
    "checkpoint:after_delete",
    "weights:during_delete",
    "weights:after_delete",
)
"""All crash points."""

_reached = 0


def crash_point(name: str) -> None:
    """Kill this process if the environment variable names this crash point."""
    global _reached
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    assert name in CRASH_POINTS, name
    place, _, times = wanted.rpartition(":")
    if not times.isdigit():
        place, times = wanted, "1"
    if name == place:
        _reached += 1
        if _reached == int(times):
            os.kill(os.getpid(), signal.SIGKILL)
