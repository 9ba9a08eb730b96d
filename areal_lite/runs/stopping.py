"""Stopping a run that is asked to, and machines that are reclaimed at a known time.

Guarantees that ranks which train together stop after the same step, whichever rank was asked. Signals reach it from
:mod:`areal_lite.cli.stop_signals`; Python code calls :func:`ask_to_stop`.
"""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from areal_lite.errors import ConfigError

_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
_signal = 0  # the first signal that asked this process, or a rank it trains with, to stop
_finishing = 0
work_left: Callable[[], Sequence[str]] = tuple  # returns what a stop of this process waits for, in order and in words


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM asked the command to stop."""


@contextmanager
def finishing(left: Callable[[], Sequence[str]] = tuple) -> Iterator[None]:
    """Delay :class:`Stopped` until the block has ended; for the main thread, where signals arrive. ``left`` is
    :data:`work_left` meanwhile; any thread may call it."""
    global _finishing, work_left
    _finishing += 1
    work_left = left
    try:
        yield
    finally:
        _finishing -= 1
        work_left = tuple
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


def stop_for(number: int) -> None:
    """Ask to stop for a signal, and raise :class:`Stopped` outside of :func:`finishing`; a second signal is ignored."""
    global _signal
    if not _signal:
        _signal = number
        if not _finishing:
            raise Stopped


def stopping_signal() -> int:
    """Return the signal that stops this process, 0 if there was none."""
    return _signal


def is_finishing() -> bool:
    return _finishing > 0


def expires_soon(
    environment: Mapping[str, str], now: float, *, margin_s: float, longest_step_s: float, saved_at: float | None = None
) -> bool:
    """Return whether to save now, because the machine may be reclaimed during the next step. A run saves once in that
    window before the machine expires, and not after it. Times are in seconds since the epoch."""
    if (name := next((name for name in _VARIABLES if environment.get(name)), None)) is None:
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
