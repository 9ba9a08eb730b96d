"""SIGINT and SIGTERM of a command: the first asks it to end, the second ends it.

Guarantees that ranks that train together stop between the same two steps, whichever of them was asked. A process
that does not come to its end shows where it stands.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SECONDS = 11.0
"""After a first signal the process ends by itself within this time, whatever is stuck, unless it is in
:func:`finishing`."""

_ECHO_SECONDS = 1.0
"""The same signal so soon again is no second one: a scheduler asks all processes, and their launcher passes it on."""
_STDERR = 2


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM asked the command to end."""


_signal = 0
"""The first that asked this process, or a rank it trains with, to end."""
_finishing = 0


@contextmanager
def finishing() -> Iterator[None]:
    """Let what is begun come to its end: :class:`Stopped` is raised after it instead of in the middle.

    For the main thread, where signals arrive.
    """
    global _finishing
    _finishing += 1
    try:
        yield
    finally:
        _finishing -= 1
    if _signal and not _finishing:
        raise Stopped


@contextmanager
def interruptible() -> Iterator[None]:
    """Within :func:`finishing`, raise :class:`Stopped` at once, also for a signal that came before."""
    global _finishing
    held, _finishing = _finishing, 0
    try:
        if _signal:
            raise Stopped
        yield
    finally:
        _finishing = held


def stop_together() -> None:
    """Raise :class:`Stopped` on every rank if one was asked to end; all call it, in :func:`finishing`."""
    global _signal
    from areal_lite.trainer.broadcast import gather_json  # torch, which most commands do without

    if asked := max(gather_json(_signal)):
        _signal = asked
        raise Stopped


class StopOnSignal:
    """The first SIGINT or SIGTERM raises :class:`Stopped` in the main thread, the second ends the process.

    A thread watches too, because the main thread sees no signal while it is inside a long call of torch.
    """

    def __init__(self) -> None:
        global _signal
        _signal = 0
        faulthandler.enable(_STDERR)  # a crash in torch shows the stack too
        self._watched, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._waker = waker
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._raise)
        threading.Thread(target=self._watch, name="signal watch", daemon=True).start()

    @property
    def signal(self) -> int:
        """The number of the signal that ends the command, 0 if there was none."""
        return _signal

    def _raise(self, number: int, frame: FrameType | None) -> None:
        global _signal
        if _signal:  # the process is ending already, and the thread sees to a second one
            return
        _signal = number
        if not _finishing:
            raise Stopped

    def _watch(self) -> None:
        first, began, shown = self._next_signal(), time.monotonic(), False
        last = first
        print("stopping; once more to stop at once", file=sys.stderr, flush=True)
        self._watched.settimeout(STOP_SECONDS)
        while True:
            try:
                last = self._next_signal()
                if last != first or time.monotonic() > began + _ECHO_SECONDS:
                    break
            except TimeoutError:
                if not shown:
                    print(f"still running after {STOP_SECONDS:g} s, here:", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(_STDERR)
                    shown = True
                if not _finishing:
                    print(f"not stopped after {STOP_SECONDS:g} s: ending here", file=sys.stderr, flush=True)
                    break
        os._exit(128 + last)

    def _next_signal(self) -> int:
        while (number := self._watched.recv(1)[0]) not in (signal.SIGINT, signal.SIGTERM):
            pass
        return number
