"""The line of a user's code that a thread is at."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parents[1]) + "/"
_STDLIB = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib"))
_PACKAGES = ("/site-packages/", "/dist-packages/")


def place_of(thread: threading.Thread) -> tuple[str, str] | None:
    """Return the user's function that a thread runs and its innermost ``FILE:LINE`` there; None outside user code.

    User code is neither the standard library nor an installed package nor areal_lite. The function is the outermost
    one, as ``Class.method``.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    users = [each for each in frames(frame) if _is_users(each.f_code.co_filename)]
    if not users:
        return None
    return users[-1].f_code.co_qualname, f"{users[0].f_code.co_filename}:{users[0].f_lineno}"


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(file: str) -> bool:
    if file.startswith(("<", _OURS, *_STDLIB)):
        return False
    return not any(folder in file for folder in _PACKAGES)
