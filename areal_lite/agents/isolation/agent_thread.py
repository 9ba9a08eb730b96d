"""Runs an agent in a thread of its own, where it may block."""

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from areal_lite.api.shared_resources import SharedResources
from areal_lite.processes.user_code import place_of

logger = logging.getLogger(__name__)
GRACE_S = 2.0
"""Seconds a thread may take to end after its cancellation, before it is left behind."""


async def run_in_thread(
    call: Callable[[], Any], *, name: str, stop: Callable[[], None], shared: SharedResources
) -> Any:
    """Return what ``call`` returns in a new thread; an awaitable is awaited on an event loop there.

    If the caller is cancelled, the coroutine in the thread is too. A thread that does not end within ``GRACE_S``, for
    instance because plain code waits for something, is left behind, logged and counted as ``abandoned_threads``.
    """
    home = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[BaseException | None, Any]] = home.create_future()
    is_cancelled = False
    task: asyncio.Task[Any] | None = None

    async def awaited(result: Awaitable[Any]) -> Any:
        nonlocal task
        task = asyncio.current_task()
        if is_cancelled and task is not None:
            task.cancel()
        return await result

    def run() -> None:
        error, result = None, None
        try:
            result = call()
            if inspect.isawaitable(result):
                result = asyncio.run(awaited(result))
        except BaseException as raised:  # the caller raises it
            error = raised
        with contextlib.suppress(RuntimeError):  # the engine's loop is closed
            home.call_soon_threadsafe(ended.set_result, (error, result))

    # A daemon, so that a thread left behind does not keep the program alive.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True)
    thread.start()
    try:
        error, result = await asyncio.shield(ended)
    except asyncio.CancelledError:
        stop()
        is_cancelled = True
        if task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)
        if not (await asyncio.wait([ended], timeout=GRACE_S))[0]:
            shared.counts["abandoned_threads"] = shared.counts.get("abandoned_threads", 0) + 1
            _, line = place_of(thread) or ("", "an unknown line")
            logger.warning(
                "the thread of %s did not end within %g s of its cancellation and is left behind at %s: give what it "
                "waits for a timeout, or set rollout.agents.isolation: process",
                name,
                GRACE_S,
                line,
            )
        raise
    if error is not None:
        raise error
    return result
