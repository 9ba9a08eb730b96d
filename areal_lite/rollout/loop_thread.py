"""One event loop in one thread, and the bridge to it from other threads and loops."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any, TypeVar
import uvloop

T = TypeVar("T")
WAKE_S = 1.0  # a waiting thread wakes this often: a signal that came just before it began to wait is handled then


class _ContextExecutor(ThreadPoolExecutor):
    """Runs what an episode gives to ``run_in_executor`` in its context, as ``asyncio.to_thread`` does."""

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return super().submit(copy_context().run, function, *args, **kwargs)


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._loop.set_default_executor(_ContextExecutor(thread_name_prefix="asyncio"))
        self._calls: dict[asyncio.Task[Any], Exception | None] = {}  # running calls, and the error of :meth:`fail`
        self._error: Exception | None = None
        self._can_fail = True
        self._stopping = False
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._stopping:
            with contextlib.suppress(BaseException):  # raised by the watchdog just after the code that it was for
                self._loop.run_forever()

    def is_current(self) -> bool:
        return threading.get_ident() == self.thread.ident

    def current_task(self) -> asyncio.Task[Any] | None:
        """Return the task that the loop runs at this moment, if any; from any thread."""
        return asyncio.current_task(self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T], unclaimed: Callable[[T], object] | None = None) -> T:
        """Run ``coroutine`` on the loop and return its result; blocks the calling thread. An interrupt of that thread
        (Ctrl-C) cancels the coroutine; if it has already finished, its result goes to ``unclaimed``, on the loop."""
        if self.is_current():
            coroutine.close()
            raise RuntimeError(
                "a blocking engine method was called inside an episode, where it would wait for itself: "
                "use its async form (asubmit, await_results, arollout_batch, aprepare_batch)"
            )
        with self._calling(coroutine, unclaimed) as future:
            while not wait([future], WAKE_S).done:
                pass
            return future.result()

    async def acall(self, coroutine: Coroutine[Any, Any, T], unclaimed: Callable[[T], object] | None = None) -> T:
        """Run ``coroutine`` on the loop from any loop; cancelling the caller acts as in :meth:`call`."""
        if self.is_current():
            return await coroutine
        with self._calling(coroutine, unclaimed) as future:
            return await asyncio.wrap_future(future)

    @contextlib.contextmanager
    def _calling(
        self, coroutine: Coroutine[Any, Any, T], unclaimed: Callable[[T], object] | None
    ) -> Iterator[Future[T]]:
        arrived: list[T] = []
        has_left = False

        async def run() -> T:
            result = await self._failing(coroutine)
            arrived.append(result)
            if has_left:
                leave()
            return result

        def leave() -> None:  # on the loop, like ``run``: the result cannot arrive meanwhile
            nonlocal has_left
            has_left = True
            if unclaimed is not None and arrived:
                unclaimed(arrived.pop())

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            yield future
        except BaseException:
            future.cancel()
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(leave)
            raise

    def fail(self, error: Exception) -> None:
        """End the calls that wait, and all later ones until :meth:`end_failing`, with ``error``; returns at once."""

        def fail() -> None:
            if self._can_fail:
                self._error = error
                for task in self._calls:
                    self._calls[task] = error
                    task.cancel()

        self.call_soon(fail)

    def end_failing(self) -> None:
        def end() -> None:
            self._can_fail, self._error = False, None

        self.call_soon(end)

    async def _failing(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._error is not None:
            coroutine.close()
            raise self._error
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = None
        try:
            return await coroutine
        except asyncio.CancelledError:
            if (error := self._calls[task]) is not None:
                raise error from None
            raise
        finally:
            del self._calls[task]

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop call ``function(*args)``; returns at once."""
        if self.is_current():
            function(*args)
        else:
            self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Cancel the remaining tasks, close the loop, and end the thread."""

        async def drain() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)
            await self._loop.shutdown_asyncgens()

        self.call(drain())
        self._stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join(timeout=5)
        if not self.thread.is_alive():
            with contextlib.suppress(OSError):  # uvloop's, if a peer closes a connection at this moment
                self._loop.close()
