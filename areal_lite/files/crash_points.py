"""Named crash points: tests kill the process there and inspect the disk.

``AREAL_LITE_CRASH_AT=weights:after_rename:3`` kills it with SIGKILL when that point is reached for the third time (the
first without a number). Without the variable a crash point does nothing.
"""

import os
import signal

VARIABLE = "AREAL_LITE_CRASH_AT"
_reached = 0


def crash_point(name: str) -> None:
    """Kill this process if the environment variable names this crash point."""
    global _reached
    wanted = os.environ.get(VARIABLE, "")
    if name in (wanted, wanted.rpartition(":")[0]):
        _reached += 1
        if _reached == int(wanted.removeprefix(name)[1:] or 1):
            os.kill(os.getpid(), signal.SIGKILL)
