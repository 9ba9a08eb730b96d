"""Named crash points: tests kill the process there and inspect the disk.

``AREAL_LITE_CRASH_AT=weights:after_rename:3`` kills it with SIGKILL when that point is reached for the third time (the
first without a number). Without the variable a crash point does nothing. ``AREAL_LITE_CRASH_VICTIM`` names a file with
the id of the process that is killed in its place.
"""

import os
import signal
from pathlib import Path

VARIABLE, VICTIM = "AREAL_LITE_CRASH_AT", "AREAL_LITE_CRASH_VICTIM"
_reached = 0


def crash_point(name: str) -> None:
    """Kill this process if the environment variable names this crash point."""
    global _reached
    wanted = os.environ.get(VARIABLE, "")
    if name in (wanted, wanted.rpartition(":")[0]):
        _reached += 1
        if _reached == int(wanted.removeprefix(name)[1:] or 1):
            victim = os.environ.get(VICTIM)
            os.kill(os.getpid() if victim is None else int(Path(victim).read_text()), signal.SIGKILL)
