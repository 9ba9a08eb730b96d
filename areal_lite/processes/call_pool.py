"""A pool of child processes that answer calls: agents and reward functions run in them.

Guarantees that a process whose call was stopped, timed out or broke is killed with all that it started, and that the
next call finds a replacement. A call cannot be taken back from Python code that computes, so there is no gentler way to
stop it: asking the process to drop a call, as a thread pool would, leaves the loop that never ends, and the next call
waits behind it. An exception is an answer like any other; its process goes on.

Calls may come from the event loops of several threads: an engine's, and those that users run. Waiting calls therefore
stand in a queue under a lock and are woken on their own loops; an ``asyncio.Semaphore`` belongs to one loop. A slot
that is granted to a call which was cancelled in the same moment goes to the next one, and a loop that closed while it
waited is passed over. What can still fail: a slot's process may die between two calls; the next call in it fails and
says how it ended.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.processes.channel import MAX_MESSAGE, BrokenMessageError, MessageSplitter, decode_reply, framed
from areal_lite.processes.child_process import ChildProcess, PickledObject, start_python
from areal_lite.processes.sent_error import rebuilt

LOAD_S = 120.0
"""Limit on starting a process and importing what a call needs, where calls have a limit."""
_MAX_PIECE = 2**16


class CallPool:
    """Up to ``size`` processes, started when calls need them; warm ones are taken first.

    Args:
        size: Maximum number of processes.
        memory_bytes: Limit on the data memory of each; 0 is unlimited.
    """

    def __init__(self, size: int, *, memory_bytes: int = 0) -> None:
        self._slots = [_Slot(memory_bytes) for _ in range(size)]
        self._idle = deque(self._slots)
        """Warm ones at the end."""
        self._waiting: deque[asyncio.Future[_Slot]] = deque()
        self._lock = threading.Lock()

    async def call(
        self,
        target: PickledObject,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Return ``target(*args, **kwargs)`` as JSON gives it, or raise its exception; kill it after ``timeout_s``."""
        call = pickle.dumps((args, kwargs or {}), pickle.HIGHEST_PROTOCOL)
        slot = await self._acquire()
        try:
            return await slot.call(target, call, timeout_s)
        finally:
            self._release(slot)

    def close(self) -> None:
        for slot in self._slots:
            slot.kill()

    async def _acquire(self) -> _Slot:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            turn: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(turn.result())
            raise

    def _release(self, slot: _Slot) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(self._grant, turn, slot)
                    return
                except RuntimeError:  # that loop is closed
                    continue
            self._idle.append(slot) if slot.is_warm else self._idle.appendleft(slot)

    def _grant(self, turn: asyncio.Future[_Slot], slot: _Slot) -> None:
        if turn.done():
            self._release(slot)
        else:
            turn.set_result(slot)


class _Slot:
    """One process of the pool, started by the first call and by the first one after a kill."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._running: tuple[ChildProcess, socket.socket] | None = None
        self._loaded: set[bytes] = set()

    @property
    def is_warm(self) -> bool:
        return self._running is not None

    async def call(self, target: PickledObject, call: bytes, timeout_s: float | None) -> Any:
        connection = self._start() if self._running is None else self._running[1]
        if target.key not in self._loaded:
            load = (target.preparation, target.pickled)
            load_s = None if timeout_s is None else LOAD_S
            await self._exchange(connection, (target.key, load, None), target.name, load_s)
            self._loaded.add(target.key)
        return await self._exchange(connection, (target.key, None, call), target.name, timeout_s)

    async def _exchange(self, connection: socket.socket, request: Any, name: str, timeout_s: float | None) -> Any:
        """Send one request and return its answer; if none comes, kill the process."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                message = framed(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
                await loop.sock_sendall(connection, message)
                (kind, value), _ = decode_reply(await receive(loop, connection))
                error = rebuilt(*value) if kind == "error" else None
        except TimeoutError:
            self.kill()
            raise TimeoutError(f"{name} gave no answer in {timeout_s:g} s; its worker process was killed") from None
        except OSError:
            process = self.kill()
            code = 0 if process is None else process.wait() or 0  # at once: it closed its socket because it ended
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RuntimeError(f"{name}: its worker process died ({how})") from None
        except BaseException:  # cancelled: the call still runs
            self.kill()
            raise
        if error is not None:
            raise error
        return value

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process = start_python("areal_lite.processes.call_child", [theirs.fileno()], self._memory_bytes)
        self._running, self._loaded = (process, ours), set()
        return ours

    def kill(self) -> ChildProcess | None:
        if self._running is None:
            return None
        (process, connection), self._running = self._running, None
        process.kill()
        connection.close()  # after the kill: the child would report a broken connection
        return process


async def receive(loop: asyncio.AbstractEventLoop, connection: socket.socket, *, max_bytes: int = MAX_MESSAGE) -> bytes:
    """Return the next body of a non-blocking socket, whose other side sends one message per request."""
    messages = MessageSplitter(max_bytes=max_bytes)
    while piece := await loop.sock_recv(connection, _MAX_PIECE):
        if bodies := [bytes(body) for body in messages.feed(piece)]:
            return bodies[0]
    raise BrokenMessageError("the stream ended")
