"""The line of a user's code that a thread is at."""

import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parents[1]) + "/"
_STDLIB = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib"))
_PACKAGES = ("/site-packages/", "/dist-packages/")


def place_of(thread: threading.Thread) -> tuple[str, str] | None:
    """Return the outermost user function that a thread runs, as ``Class.method``, and the innermost ``FILE:LINE`` of
    user code; None outside such code, which is neither the standard library nor an installed package nor areal_lite."""
    frame, users = sys._current_frames().get(thread.ident or 0), list[FrameType]()
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(("<", _OURS, *_STDLIB)) or any(folder in file for folder in _PACKAGES)):
            users.append(frame)
        frame = frame.f_back
    if not users:
        return None
    return users[-1].f_code.co_qualname, f"{users[0].f_code.co_filename}:{users[0].f_lineno}"
