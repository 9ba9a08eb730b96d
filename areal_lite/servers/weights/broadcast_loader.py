"""Broadcasts of the weights to servers, over one process group for each.

Guarantees that a group whose broadcast failed is never used again: the next update forms another one, and so does the
first after a server was down. The two ends of a group know only how many tensors they have exchanged, so after a
failure the next tensor could land in the memory of another one, of equal size, without an error.

One group of the trainer and all servers would send each tensor once. But a collective waits for its slowest member: one
server that is gone would stop all the others, and a server that is back could not join before all had left.

Each step has two halves that only end together: a request to the server, and the trainer's part in a thread. A thread
that is in a collective cannot be cancelled. So when one half fails, the other is left, not awaited, and the group is
closed under it; the thread then ends within the stall limit of :mod:`process_group`.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from areal_lite.errors import ServerError
from areal_lite.servers.client.server_requests import RefusedError, ServerRequests
from areal_lite.servers.dialects.dialect import ControlCall
from areal_lite.servers.pool.server_pool import Server
from areal_lite.servers.weights.published_weights import WeightBroadcast

if TYPE_CHECKING:
    from areal_lite.servers.weights.broadcaster import BroadcastGroup

T = TypeVar("T")
CLOSE_S = 10.0  # seconds in which the thread of a closed group should end, above the stall limit of process_group
Paused = Callable[[], AbstractAsyncContextManager[None]]  # returns a context in which a server is paused


class BroadcastLoader:
    """Has servers load broadcasts, and owns the trainer's process groups with them."""

    def __init__(self, requests: ServerRequests, *, timeout_s: float) -> None:
        self._requests = requests
        self._dialect = requests.dialect
        self._timeout_s = timeout_s
        self._groups: dict[Server, BroadcastGroup] = {}
        self._working: set[asyncio.Future[Any]] = set()

    async def load(self, server: Server, weights: WeightBroadcast, paused: Paused) -> None:
        """Broadcast ``weights`` to a server, which generates meanwhile if it can; ``paused`` pauses it."""
        if server in self._groups:
            with contextlib.suppress(RefusedError, OSError):  # the server may have restarted since the last update
                return await self._broadcast(server, weights, paused)
        await self._broadcast(server, weights, paused)

    def drop(self, server: Server) -> None:
        """Close the group of a server; its end notices that."""
        if (group := self._groups.pop(server, None)) is not None:
            group.close()

    async def close(self) -> None:
        """Leave all groups, and wait until no thread joins or sends: a process that ends during either would crash."""
        for server in list(self._groups):
            self.drop(server)
        if self._working:
            await asyncio.wait(self._working, timeout=CLOSE_S)

    async def _join(self, server: Server, weights: WeightBroadcast) -> "BroadcastGroup":
        host, info = urlsplit(server.url).hostname or "", server.info
        group: BroadcastGroup = await self._in_thread(
            lambda: weights.sender.open_group(host, num_ranks=info.num_ranks or 1, device=info.device)
        )
        self._groups[server] = group
        await self._both(server, self._dialect.join_group(group), group.join)
        return group

    async def _broadcast(self, server: Server, weights: WeightBroadcast, paused: Paused) -> None:
        dialect = self._dialect
        try:
            group = self._groups.get(server) or await self._join(server, weights)
            async with AsyncExitStack() as stack:
                if not dialect.receives_while_generating:
                    await stack.enter_async_context(paused())
                await self._begin(server)
                for number, bucket in enumerate(weights.buckets, start=1):
                    version = weights.version if number == len(weights.buckets) else None
                    call = dialect.receive(bucket, group.name, version)
                    try:
                        await self._both(server, call, partial(group.send, bucket))
                    except RefusedError as error:
                        if number > 1 and not dialect.receives_while_generating:
                            raise ServerError(f"{error}; it has some of the new weights") from None
                        raise
                if dialect.receives_while_generating:
                    await stack.enter_async_context(paused())
                for call in dialect.end_broadcast(weights.version):
                    await self._requests.control(server, call, timeout_s=self._timeout_s)
        except BaseException:
            self.drop(server)
            raise

    async def _begin(self, server: Server) -> None:
        begin, abandon = self._dialect.begin_broadcast, self._dialect.abandon_broadcast
        try:
            await self._requests.control(server, begin)
        except RefusedError:  # one that broke off has left the server in the middle of an update
            if abandon is None:
                raise
            with contextlib.suppress(RefusedError):  # the embedded server loads no part of the weights
                await self._requests.control(server, abandon)
            await self._requests.control(server, begin)

    async def _both(self, server: Server, call: ControlCall, work: Callable[[], None]) -> None:
        """Send a request while a thread does the trainer's part; the first error ends both."""
        request = self._requests.control(server, call, timeout_s=self._timeout_s)
        tasks = [asyncio.create_task(request), asyncio.create_task(self._in_thread(work))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
                task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking work in a thread of its own, because it may hang longer than its caller waits."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                outcome = work()
            except Exception as error:
                result.set_exception(error)
            else:
                result.set_result(outcome)

        threading.Thread(target=run, name="weight broadcast", daemon=True).start()
        waited = asyncio.wrap_future(result)
        self._working.add(waited)
        waited.add_done_callback(self._working.discard)
        waited.add_done_callback(lambda future: future.cancelled() or future.exception())  # the caller may have left
        return await asyncio.shield(waited)
