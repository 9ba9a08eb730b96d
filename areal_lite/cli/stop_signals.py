"""SIGINT and SIGTERM: the first asks the command to stop, the second ends the process.

Each says what it waits for or skips. A process that does not stop in time prints the stacks of its threads and
tasks with ``-v``, and as one of several ranks, whose hang nobody sees. What stopping means for a run is in
:mod:`areal_lite.runs.stopping`.
"""

import asyncio
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from areal_lite.processes.quick_import import is_rank
from areal_lite.runs import stopping
from areal_lite.runs.stopping import ask_to_stop, is_finishing, stop_for

STOP_SECONDS = 11.0
"""The process ends at most this long after the first signal, even if it is stuck, unless it is in
:func:`~areal_lite.runs.stopping.finishing`."""

_ECHO_SECONDS = 1.0
"""The same signal again within this time is ignored: a scheduler may signal a process that a launcher signals too."""
_STDERR = 2
DEBUG = "AREAL_LITE_DEBUG"
"""Environment variable that ``-v`` sets to 1: errors show where they come from, and so do processes that hang."""


def stop_on_signals() -> None:
    """Have the first SIGINT or SIGTERM raise Stopped in the main thread, and the second end the process.

    A thread watches as well, because the main thread handles no signal during a long call into torch.
    """
    ask_to_stop(False)
    faulthandler.enable(_STDERR)  # also print the stack if torch crashes
    watched, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop_for(number))
    threading.Thread(target=_watch, args=(watched, waker), name="signal watch", daemon=True).start()


def _watch(watched: socket.socket, waker: socket.socket) -> None:
    """End the process after a second signal, or when the first has no effect; ``waker`` stays open meanwhile."""
    first, began, shown = _next_signal(watched), time.monotonic(), False
    last = first
    waits = f": waiting for {', then '.join(left)}" if (left := stopping.work_left()) else ""
    _say(f"stopping{waits}; signal again to stop at once")
    watched.settimeout(STOP_SECONDS)
    while True:
        try:
            last = _next_signal(watched)
            if last != first or time.monotonic() > began + _ECHO_SECONDS:
                _say(f"stopped at once, without {' and '.join(stopping.work_left()) or 'cleaning up'}")
                break
        except TimeoutError:
            if not shown:
                stack = is_rank() or os.environ.get(DEBUG) == "1"
                _say(f"still running after {STOP_SECONDS:g} s{', here:' if stack else ' (-v shows where)'}")
                if stack:
                    faulthandler.dump_traceback(_STDERR)
                    print(task_stacks(), file=sys.stderr, flush=True)
                shown = True
            if not is_finishing():
                _say(f"not stopped after {STOP_SECONDS:g} s: ending here")
                break
    os._exit(128 + last)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # one write: the process may end at any moment
    sys.stderr.flush()


def _next_signal(watched: socket.socket) -> int:
    while (number := watched.recv(1)[0]) not in (signal.SIGINT, signal.SIGTERM):
        pass
    return number


def task_stacks() -> str:
    """Return the stacks of this process's asyncio tasks, outermost call first, each with its number of tasks."""
    tasks = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task) and not each.done()]
    stacks = Counter("".join(_calls(task.get_coro())) for task in tasks)
    return "\n".join(f"{count} x\n{stack}" for stack, count in stacks.most_common())


def _calls(awaited: Any) -> Iterator[str]:
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        yield f"  {frame.f_code.co_qualname} at {frame.f_code.co_filename}:{frame.f_lineno}\n"
        awaited = awaited.cr_await
