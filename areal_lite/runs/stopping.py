"""Stopping a run: SIGINT and SIGTERM, and machines that are reclaimed at a known time.

The first signal asks the command to stop, the second ends the process. Guarantees that ranks which train together
stop after the same step, whichever rank got the signal. A process that does not stop in time prints its stack.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from areal_lite.errors import ConfigError

STOP_SECONDS = 11.0
"""The process ends at most this long after the first signal, even if it is stuck, unless it is in
:func:`finishing`."""

_ECHO_SECONDS = 1.0
"""The same signal again within this time is ignored: a scheduler may signal all processes, and their launcher
forwards it."""
_STDERR = 2
_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM asked the command to stop."""


_signal = 0
"""The first signal that asked this process, or a rank it trains with, to stop."""
_finishing = 0


@contextmanager
def finishing() -> Iterator[None]:
    """Delay :class:`Stopped` until the block has ended; for the main thread, where signals arrive."""
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
    """Inside :func:`finishing`, raise :class:`Stopped` at once, also for an earlier signal."""
    global _finishing
    held, _finishing = _finishing, 0
    try:
        if _signal:
            raise Stopped
        yield
    finally:
        _finishing = held


def stop_together() -> None:
    """Raise :class:`Stopped` on every rank if one of them got a signal; all call it, inside :func:`finishing`."""
    global _signal
    from areal_lite.models.parallel.ranks import gather_json  # loads torch, which most commands do not need

    if asked := max(gather_json(_signal)):
        _signal = asked
        raise Stopped


def ask_to_stop(asked: bool) -> None:
    """Have the run of this process stop after its current step, as a SIGINT does; False withdraws that."""
    global _signal
    _signal = signal.SIGINT if asked else 0


class StopOnSignal:
    """The first SIGINT or SIGTERM raises :class:`Stopped` in the main thread, the second ends the process.

    A thread watches as well, because the main thread handles no signal during a long call into torch.
    """

    def __init__(self) -> None:
        global _signal
        _signal = 0
        faulthandler.enable(_STDERR)  # also print the stack if torch crashes
        self._watched, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._waker = waker
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._raise)
        threading.Thread(target=self._watch, name="signal watch", daemon=True).start()

    @property
    def signal(self) -> int:
        """Number of the signal that stops the command, 0 if there was none."""
        return _signal

    def _raise(self, number: int, frame: FrameType | None) -> None:
        global _signal
        if _signal:  # already stopping; the thread handles a second signal
            return
        _signal = number
        if not _finishing:
            raise Stopped

    def _watch(self) -> None:
        first, began, shown = self._next_signal(), time.monotonic(), False
        last = first
        # One write: the process may end at any moment.
        sys.stderr.write("stopping; signal again to stop at once\n")
        sys.stderr.flush()
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


def expires_soon(
    environment: Mapping[str, str], now: float, *, margin_s: float, longest_step_s: float, saved_at: float | None = None
) -> bool:
    """Return whether to save now, because the machine may be reclaimed during the next step.

    A run saves once in that window before the machine expires, and not after it. Times are in seconds since the epoch.
    """
    name = next((name for name in _VARIABLES if environment.get(name)), None)
    if name is None:
        return False
    try:
        expires = float(environment[name])
    except ValueError:
        raise ConfigError(
            f"{name} is {environment[name]!r}: it must be the time at which the machine expires, in seconds since the "
            "epoch; fix or unset it"
        ) from None
    begins = expires - margin_s - longest_step_s
    return begins <= now < expires and (saved_at is None or saved_at < begins)
