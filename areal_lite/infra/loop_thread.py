"""One event loop in one thread, and the bridge to it from other threads and loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Starts a thread with an event loop; ``stop`` ends it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def is_current(self) -> bool:
        """Return whether the caller runs on this loop."""
        return threading.get_ident() == self._thread.ident

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the loop and return its result; blocks the calling thread.

        An interrupt of the waiting thread (Ctrl-C) cancels the coroutine.

        Raises:
            RuntimeError: If called on the loop itself, where it would wait for ever.
        """
        if self.is_current():
            coroutine.close()
            raise RuntimeError(
                "a blocking engine method was called inside an episode, where it would wait for itself: "
                "use its async form (asubmit, await_results, arollout_batch, aprepare_batch)"
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the loop from any loop."""
        if self.is_current():
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop call ``function(*args)``; returns at once."""
        if self.is_current():
            function(*args)
        else:
            self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Cancel what is left, close the loop, and end the thread."""

        async def drain() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)
            await self._loop.shutdown_asyncgens()

        self.call(drain())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()
