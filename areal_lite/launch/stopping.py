"""SIGINT and SIGTERM of a command: the first asks it to end, the second ends it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SECONDS = 11.0
"""After a first signal the process ends by itself within this time, whatever is stuck, unless it is in
:func:`finishing`."""


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM asked the command to end."""


_finishing = 0
_stop_after = False


@contextmanager
def finishing() -> Iterator[None]:
    """Let what is begun come to its end: :class:`Stopped` is raised after it instead of in the middle.

    For the main thread, where signals arrive.
    """
    global _finishing, _stop_after
    _finishing += 1
    try:
        yield
    finally:
        _finishing -= 1
    if _stop_after and not _finishing:
        _stop_after = False
        raise Stopped


class StopOnSignal:
    """The first SIGINT or SIGTERM raises :class:`Stopped` in the main thread, the second ends the process.

    A thread watches too, because the main thread sees no signal while it is inside a long call of torch.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._watched, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._waker = waker
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._raise)
        threading.Thread(target=self._watch, name="signal watch", daemon=True).start()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        global _stop_after
        self.signal = number
        if not _finishing:
            raise Stopped
        _stop_after = True

    def _watch(self) -> None:
        first = self._next_signal()
        print("stopping; once more to stop at once", file=sys.stderr, flush=True)
        last = first
        self._watched.settimeout(STOP_SECONDS)
        while True:
            try:
                last = self._next_signal()
            except TimeoutError:
                if _finishing:
                    continue
                print(f"not stopped after {STOP_SECONDS:g} s: ending here", file=sys.stderr, flush=True)
            os._exit(128 + last)

    def _next_signal(self) -> int:
        while (number := self._watched.recv(1)[0]) not in (signal.SIGINT, signal.SIGTERM):
            pass
        return number
