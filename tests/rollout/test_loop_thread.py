"""A call that waits for the loop can be interrupted at any moment."""

from __future__ import annotations
import asyncio
import concurrent.futures
import contextlib
import inspect
import queue
import signal
import threading
import pytest
from areal_lite.rollout.loop_thread import LoopThread
from tests.rollout.scripted import until


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


def test_a_call_whose_caller_cannot_wait_is_never_run() -> None:
    loop, begun = LoopThread("test"), threading.Event()

    async def begin() -> None:
        begun.set()

    async def inside() -> None:
        loop.call(coroutine)

    coroutine = begin()
    with pytest.raises(RuntimeError, match="use its async form"):
        loop.call(inside())
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    loop.fail(KeyError("broken"))
    coroutine = begin()
    with pytest.raises(KeyError, match="broken"):
        loop.call(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    loop.end_failing()
    loop.fail(KeyError("once more"))
    loop.call(begin())
    assert begun.is_set()
    loop.stop()


def test_an_error_ends_the_calls_that_wait_and_a_cancellation_stays_one() -> None:
    loop, waiting = LoopThread("test"), threading.Semaphore(0)

    async def waits() -> None:
        waiting.release()
        await asyncio.Event().wait()

    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        loop.call(cancels())
    with concurrent.futures.ThreadPoolExecutor() as threads:
        calls = [threads.submit(loop.call, waits()), threads.submit(asyncio.run, loop.acall(waits()))]
        for _ in calls:
            assert waiting.acquire(timeout=10)
        loop.call_soon(loop.fail, KeyError("broken"))  # from the loop itself
        for call in calls:
            with pytest.raises(KeyError, match="broken"):
                call.result(10)
    loop.end_failing()
    loop.stop()


def test_a_result_whose_caller_left_is_passed_on() -> None:
    loop = LoopThread("test")
    unclaimed: queue.SimpleQueue[int] = queue.SimpleQueue()

    async def late() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 7

    async def leave() -> None:
        asked = asyncio.ensure_future(loop.acall(late(), unclaimed.put))
        await asyncio.to_thread(until, lambda: loop._calls)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(leave())
    assert unclaimed.get(timeout=10) == 7
    loop.stop()


def test_code_on_the_loop_knows_its_loop() -> None:
    loop = LoopThread("test")

    async def own() -> bool:
        return asyncio.get_event_loop_policy().get_event_loop() is loop._loop

    assert loop.call(own()) and not loop.is_current() and loop.thread.daemon
    loop.stop()


def test_tasks_that_run_clean_up_when_the_loop_stops() -> None:
    loop, ended = LoopThread("test"), threading.Event()
    tasks: list[asyncio.Task[None]] = []

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def begin() -> None:
        tasks.append(asyncio.create_task(hangs()))
        await asyncio.sleep(0)

    loop.call(begin())
    loop.stop()
    assert ended.is_set()
