"""The end of a process that trains as one of several ranks, without the interpreter's last part.

Torch's process groups run threads in C++ that may outlive ``destroy_process_group``: whatever still refers to a group
keeps its threads, such as the device mesh of a sharded model, a cycle, or the frames of an error. The interpreter's end
takes objects and C++ state apart under them, and now and then that aborts a rank whose work is done ("terminate called
without an active exception", exit code -6), and with it the run. No order of destruction rules it out.

So a rank waits for threads, calls what is registered with ``atexit`` and writes what is buffered, in the interpreter's
order, and then leaves at once, as the children of ``multiprocessing`` do.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn
from areal_lite.runs.stopping import stopping_signal


def follow_launcher() -> None:
    """Have SIGTERM stop this rank if torchrun is killed, which else leaves its ranks, and the run's folder locked."""
    # The signal comes when the thread that started this process ends: torchrun's is its main one.
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def end_with(program: Callable[[], int]) -> NoReturn:
    """Run the program of this process and end with the exit code that it returns, as ``sys.exit(program())`` does."""
    code: Any
    try:
        code = program()
    except SystemExit as end:
        code = end.code
    except BaseException:  # a signal as the program ends
        traceback.print_exc()
        code = 128 + number if (number := stopping_signal()) else 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    end_rank(code or 0)


def end_rank(code: int) -> NoReturn:
    """End this process with an exit code; for programs of your own too. Nothing of them runs afterwards."""
    try:
        for step in (threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):  # as at the interpreter's end; a signal ends the step it meets
                step()
    finally:
        os._exit(code & 0xFF)


def _flush() -> None:
    """Write what files, the standard streams and C code hold in buffers; a file that cannot be written is left."""
    gc.unfreeze()  # what was loaded with torch is hidden from the line below
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    files = [each for each in gc.get_objects() if issubclass(type(each), kinds)]  # isinstance may run users' code
    files.sort(key=lambda file: not isinstance(file, io.TextIOWrapper))  # texts first: they write into the others
    for file in (sys.stdout, sys.stderr, *files):
        with contextlib.suppress(Exception):
            if not file.closed and file.writable():
                file.flush()
    ctypes.CDLL(None).fflush(None)
