"""Runs an agent in a thread of its own, where it may block."""

from __future__ import annotations

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
    instance because it is plain code that waits for something else, is left behind, logged and counted as
    ``abandoned_threads``.
    """
    agent = _AgentThread(call, name)
    try:
        error, result = await asyncio.shield(agent.ended)
    except asyncio.CancelledError:
        stop()
        agent.cancel()
        if not (await asyncio.wait([agent.ended], timeout=GRACE_S))[0]:
            shared.counts["abandoned_threads"] = shared.counts.get("abandoned_threads", 0) + 1
            _, line = place_of(agent.thread) or ("", "an unknown line")
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


class _AgentThread:
    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self._call = call
        self._home = asyncio.get_running_loop()
        self.ended: asyncio.Future[tuple[BaseException | None, Any]] = self._home.create_future()
        """The error or None, and the result."""
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        # A daemon, so that a thread left behind does not keep the program alive.
        context = contextvars.copy_context()
        self.thread = threading.Thread(target=context.run, args=(self._main,), name=name, daemon=True)
        self.thread.start()

    def cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def _main(self) -> None:
        error: BaseException | None = None
        result = None
        try:
            result = self._call()
            if inspect.isawaitable(result):
                result = asyncio.run(self._await(result))
        except BaseException as raised:  # the caller raises it
            error = raised
        with contextlib.suppress(RuntimeError):  # the engine's loop is closed
            self._home.call_soon_threadsafe(self._end, error, result)

    async def _await(self, awaitable: Awaitable[Any]) -> Any:
        self._task = asyncio.current_task()
        if self._cancelled and self._task is not None:
            self._task.cancel()
        return await awaitable

    def _end(self, error: BaseException | None, result: Any) -> None:
        if not self.ended.done():
            self.ended.set_result((error, result))
