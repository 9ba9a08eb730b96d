"""A pool of child processes that answer calls: agents, environments and reward functions run in them.

Guarantees that a process whose call was stopped, timed out or broke is killed with all that it started, and that the
next call finds a replacement. A call cannot be taken back from Python code that computes, so there is no gentler way to
stop it: asking the process to drop a call, as a thread pool would, leaves the loop that never ends, and the next call
waits behind it. An exception is an answer like any other; its process goes on.

A lease lends a slot for several calls, which share what they keep in its process. So that a holder that never returns
does not keep it, it can be retired: its process is killed, and a new slot takes its place. The holder's calls fail, and
its release frees nothing. The socket stays open until then, because an event loop may be waiting for it.

Calls may come from the event loops of several threads: an engine's, and those that users run. Waiting calls therefore
stand in a queue under a lock and are woken on their own loops; an ``asyncio.Semaphore`` belongs to one loop. A slot
that is granted to a call which was cancelled in the same moment goes to the next one, and a loop that closed while it
waited is passed over. What can still fail: a process may die between two calls; the next call in it fails and says how.
"""

import asyncio
import atexit
import os
import pickle
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from areal_lite.processes.channel import MAX_MESSAGE, BrokenMessageError, MessageSplitter, decode_reply, framed, rebuilt
from areal_lite.processes.child_process import ChildProcess, PickledObject, start_python

LOAD_S = 120.0
"""Limit on starting a process and importing what a call needs, where calls have a limit."""
_CHILD = "areal_lite.processes.call_child"
_MAX_PIECE = 2**16


class CallPool:
    """Up to ``size`` processes, started when calls need them; warm ones are taken first.

    Args:
        size: Maximum number of processes.
        memory_bytes: Limit on the data memory of each; 0 is unlimited.
        python: Command of their interpreter, which may be another one, or in a box.
    """

    def __init__(self, size: int, *, memory_bytes: int = 0, python: Sequence[str] = (sys.executable,)) -> None:
        self._new = partial(Slot, memory_bytes, python)
        self._slots = [self._new() for _ in range(size)]
        self._idle = deque(self._slots)
        """Warm ones at the end."""
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, Future[Slot]]] = deque()
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
        slot = await self.lease()
        try:
            return await slot.call(target, call, timeout_s)
        finally:
            self.release(slot)

    def retire(self, slot: "Slot", lease: int, why: str) -> None:
        """Kill the process of a slot unless a later lease than this uses it; replace a slot that is lent."""
        with self._lock:
            if slot.leases != lease or slot.end:
                return
            if slot in self._idle:
                slot.kill()
                self._idle.remove(slot)
                return self._idle.appendleft(slot)
            slot.end = why
            if slot.running is not None:
                slot.running[0].kill()
            new = self._slots[self._slots.index(slot)] = self._new()
        self.release(new)

    def close(self) -> None:
        for slot in self._slots:
            slot.kill()

    def release(self, slot: "Slot", *, reuse: bool = True) -> None:
        """Pass a slot on, unless it is retired; without ``reuse`` its process is killed."""
        if slot.end or not reuse:
            slot.kill()
        with self._lock:
            while self._waiting and not slot.end:
                loop, turn = self._waiting.popleft()
                if not loop.is_closed() and turn.set_running_or_notify_cancel():
                    slot.leases += 1
                    turn.set_result(slot)
                    return
            if not slot.end:
                self._idle.append(slot) if slot.is_warm else self._idle.appendleft(slot)

    async def lease(self) -> "Slot":
        """Wait for a slot and lend it until one :meth:`release`."""
        with self._lock:
            if self._idle:
                self._idle[-1].leases += 1
                return self._idle.pop()
            turn = Future[Slot]()
            self._waiting.append((asyncio.get_running_loop(), turn))
        try:
            return await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # granted in the same moment: the lease was not used, and is none
                turn.result().leases -= 1
                self.release(turn.result())
            raise


class Slot:
    """One process of the pool, started by the first call and by the first one after a kill."""

    def __init__(self, memory_bytes: int, python: Sequence[str]) -> None:
        self._memory_bytes, self._python = memory_bytes, python
        self.leases, self.uses = 0, 0
        """How often it was lent, and what users count since its process started."""
        self.end = ""
        """Why it was retired."""
        self.running: tuple[ChildProcess, socket.socket] | None = None
        self._loaded: set[bytes] = set()

    @property
    def is_warm(self) -> bool:
        return self.running is not None and self.running[0].wait(0) is None

    async def call(self, target: PickledObject, call: bytes, timeout_s: float | None = None) -> Any:
        """Do what :meth:`CallPool.call` does; ``call`` is the pickled pair of its ``args`` and ``kwargs``."""
        if self.end:
            raise RuntimeError(f"{target.name}: its worker process died ({self.end})")
        connection = self._start() if self.running is None else self.running[1]
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
                await loop.sock_sendall(connection, framed(pickle.dumps(request, pickle.HIGHEST_PROTOCOL)))
                (kind, value), _ = decode_reply(await receive(loop, connection))
                error = rebuilt(*value) if kind == "error" else None
        except TimeoutError:
            self.kill()
            raise TimeoutError(f"{name} gave no answer in {timeout_s:g} s; its worker process was killed") from None
        except OSError:
            process = self.kill()
            code = 0 if process is None else process.wait() or 0  # at once: it closed its socket because it ended
            how = self.end or (signal.Signals(-code).name if code < 0 else f"exit code {code}")
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
            process = start_python(_CHILD, [theirs.fileno()], self._memory_bytes, python=self._python)
        self.running, self._loaded = (process, ours), set()
        return ours

    def kill(self) -> ChildProcess | None:
        if self.running is None:
            return None
        (process, connection), self.running, self.uses = self.running, None, 0
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


_shared: dict[tuple[Any, ...], CallPool] = {}


def shared_pool(size: int, memory_bytes: int = 0, python: Sequence[str] = (sys.executable,)) -> CallPool:
    """Return this process's pool with these arguments; it is closed when the process ends."""
    key = (os.getpid(), size, memory_bytes, *python)  # a forked child must not talk to its parent's workers
    if key not in _shared:
        _shared[key] = CallPool(size, memory_bytes=memory_bytes, python=python)
    return _shared[key]


@atexit.register
def close_shared_pools() -> None:
    """Kill the processes of all shared pools; their next calls start new ones."""
    for (pid, *_), pool in _shared.items():
        if pid == os.getpid():
            pool.close()
