"""A call that waits for the loop can be interrupted at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading

import pytest

from areal_lite.infra.loop_thread import LoopThread


def test_an_interrupt_that_does_not_wake_the_waiting_thread_is_not_lost() -> None:
    """A signal that another thread takes is like one that comes just before the main thread begins to wait."""
    loop, cancelled = LoopThread("test"), threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    watched = signal.set_wakeup_fd(-1)  # of a command that an earlier test ran: its watch would end this process

    async def waits() -> None:
        threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        cancelled.set()

    try:
        with pytest.raises(KeyboardInterrupt):
            loop.call(waits())
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(watched)
    assert cancelled.wait(10)
    loop.stop()


def test_a_timeout_of_the_call_itself_is_raised() -> None:
    async def late() -> None:
        raise TimeoutError("late")

    loop = LoopThread("test")
    with pytest.raises(TimeoutError, match="late"):
        loop.call(late())
    loop.stop()


def test_a_stopped_loop_is_closed_and_its_thread_has_ended() -> None:
    loop = LoopThread("test")
    loop.stop()
    assert loop._loop.is_closed() and not loop.thread.is_alive()
