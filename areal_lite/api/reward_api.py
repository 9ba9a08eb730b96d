"""Reward functions run off the event loop, in worker processes that can be killed.

A missing reward is a failure with its reason, never a 0: timeouts, dead workers, exceptions and values that are not
finite numbers all raise. What a function returns beside its reward goes into the episode's record. This guards against
accidents (endless loops, memory, ``os._exit``); it is not a sandbox against an attacker.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_lite.api.failure import FailureKind, attributed_to
from areal_lite.config.dotted_path import load_object
from areal_lite.errors import ConfigError
from areal_lite.processes import reward_worker as wire
from areal_lite.processes.child_process import pickled_object, start_tied

START_SECONDS = 120.0
"""Limit on starting a worker and importing the reward function's module."""
_MAX_REPLY_BYTES = 2**24


class AsyncRewardWrapper:
    """Makes a reward function awaitable: ``await wrapper(prompt, completion, prompt_ids, completion_ids, **row)``.

    A plain function runs in one of ``max_workers`` processes that all wrappers with that number share;
    an ``async def`` function (a judge behind HTTP, say) is awaited on the caller's loop, under the same limit.

    A function returns a number, a list or array with one for each token of the answer, or a dict with either as
    ``score`` (or ``reward``). Numbers and texts beside it in the dict go into the dump of the running episode, and the
    means of the numbers into the run's metrics as ``rollout/reward_extra/NAME``.

    Args:
        reward_fn: A function at module level, a picklable callable, or a dotted path to one.
        timeout_seconds: Limit on one call. The clock starts when a worker has loaded the function and
            is given the call; waiting for a free worker is not counted.
        max_workers: Processes; None takes half the cores, at least 2.
        max_retries: Retries after a failure of any kind.
        in_process: Call the function on the event loop itself: for cheap, pure functions, also
            lambdas. It cannot be timed out.

    Raises:
        ConfigError: If an argument is out of range, or the function cannot be sent to a worker.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        timeout_seconds: float = 15,
        max_workers: int | None = None,
        max_retries: int = 0,
        *,
        in_process: bool = False,
    ) -> None:
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds is {timeout_seconds!r}: it must be above 0")
        if max_retries < 0:
            raise ConfigError(f"max_retries is {max_retries}: it must be 0 or more")
        if max_workers is not None and max_workers < 1:
            raise ConfigError(f"max_workers is {max_workers}: it must be 1 or more, or None")
        function = load_object(reward_fn, where="reward_fn") if isinstance(reward_fn, str) else reward_fn
        if not callable(function):
            raise ConfigError(f"reward_fn is {function!r}: it must be callable")
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function))
        self._timeout_s = float(timeout_seconds)
        self._max_workers = max_workers or max(2, (os.cpu_count() or 2) // 2)
        self._max_retries = max_retries
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self._in_process = in_process
        self._sendable = None if self._is_async or in_process else _Sendable(function, self._name)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the reward: a float, or a list of floats if there is one for each token.

        Raises:
            TimeoutError: After ``timeout_seconds``; the worker is killed.
            ValueError: If the function returned anything else, a number that is not finite, or another number of
                rewards than ``completion_ids``, the fourth argument, has tokens.
            RuntimeError: If the worker died.
            Exception: What the function raised, with its text and the worker's traceback as a note.
        """
        for _ in range(self._max_retries):
            try:
                return await self._checked(args, kwargs)
            except Exception:
                continue  # the last try's error is the one that counts
        with attributed_to(FailureKind.REWARD):
            return await self._checked(args, kwargs)

    async def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | list[float]:
        value, facts = await self._call(args, kwargs)
        tokens = args[3] if len(args) > 3 else kwargs.get("completion_ids", ())
        if isinstance(value, list) and len(value) != len(tokens):
            raise ValueError(
                f"reward {self._name} is a list of {len(value)} for {len(tokens)} completion_ids: it must be a finite "
                "number, or one for each of them"
            )
        if facts:
            from areal_lite.api.scalars import record_reward_facts  # which loads numpy

            record_reward_facts(facts)
        return value

    async def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> wire.Reward:
        if self._is_async:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    return wire.read_reward(await self._function(*args, **kwargs))
            except TimeoutError:
                if not limit.expired():
                    raise
                raise TimeoutError(f"reward {self._name} gave no answer in {self._timeout_s:g} s") from None
        if self._sendable is None:
            return wire.read_reward(self._function(*args, **kwargs))
        message = pickle.dumps((self._sendable.key, args, kwargs), pickle.HIGHEST_PROTOCOL)
        pool = _pool(self._max_workers)
        worker = await pool.acquire()
        try:
            return await worker.call(self._sendable, message, self._timeout_s)
        finally:
            pool.release(worker)


class _Sendable:
    """A reward function as a worker loads it: by name, plus the main script only if it lives there."""

    _keys = itertools.count()

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.key = next(self._keys)
        self.name = name
        hint = (
            "A lambda or a nested function has no importable name: define it with def at the top of a module, or pass "
            "in_process=True if it is cheap and pure"
        )
        sent = pickled_object(function, name=f"reward_fn {name}", hint=hint)
        load = sent.pickled, sent.preparation
        self.load_message = pickle.dumps((self.key, None, load), pickle.HIGHEST_PROTOCOL)


class _Worker:
    """A slot of the pool; its process is started on the first call and again after a kill."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self.process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._loaded: set[int] = set()

    async def call(self, function: _Sendable, message: bytes, timeout_s: float) -> wire.Reward:
        if self.process is None:
            self._start()
        if function.key not in self._loaded:
            await self._exchange(function.load_message, function, START_SECONDS)
            self._loaded.add(function.key)
        kind, body = await self._exchange(message, function, timeout_s)
        return wire.read_reward(json.loads(body) if kind == wire.DETAILS else wire.NUMBER.unpack(body)[0])

    async def _exchange(self, message: bytes, function: _Sendable, timeout_s: float) -> tuple[bytes, bytes]:
        """Send one message and return kind and body of its answer; any error kills the process."""
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(self._socket, wire.LENGTH.pack(len(message)) + message)
                reply = await loop.sock_recv(self._socket, 1 << 16)
                while len(reply) < (size := _reply_size(reply)):
                    more = await loop.sock_recv(self._socket, size - len(reply))
                    if not more:
                        raise ConnectionResetError("end of stream")
                    reply += more
        except TimeoutError:
            _wait_aside(self.kill())
            raise TimeoutError(
                f"reward {function.name} gave no answer in {timeout_s:g} s; its worker process was killed"
            ) from None
        except OSError:
            code = self.kill().wait()  # at once: it closed its socket because it ended
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RuntimeError(f"reward {function.name}: its worker process died ({how})") from None
        except BaseException:  # cancelled: the function still runs
            _wait_aside(self.kill())
            raise
        kind, body = reply[:1], reply[wire.REPLY.size :]
        if kind == wire.RAISED:
            raise wire.rebuild(body)
        return kind, body

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self.process, self._held_open = start_tied(
                [sys.executable, "-P", str(Path(wire.__file__)), str(theirs.fileno()), str(self._memory_bytes)],
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self._socket = ours
        self._loaded = set()

    def kill(self) -> subprocess.Popen[bytes]:
        """Kill the process and return it, to be waited for."""
        process, connection = self.process, self._socket
        assert process is not None and connection is not None
        os.killpg(process.pid, signal.SIGKILL)  # its leader is not reaped yet, so the group is there
        connection.close()  # after the kill: the worker would report a broken connection
        os.close(self._held_open)
        self.process = self._socket = None
        return process


def _wait_aside(process: subprocess.Popen[bytes]) -> None:
    # Gigabytes take the kernel a while to free; the event loop must not wait for it.
    threading.Thread(target=process.wait).start()


class _Pool:
    """Hands out workers, warm ones first; calls may come from the loops of several threads."""

    def __init__(self, size: int) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // size
        self.workers = [_Worker(max(4 << 30, memory)) for _ in range(size)]
        self._idle = list(self.workers)
        self._waiting: deque[asyncio.Future[_Worker]] = deque()
        self._lock = threading.Lock()

    async def acquire(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            turn: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(turn.result())
            raise

    def release(self, worker: _Worker) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(self._grant, turn, worker)
                    return
                except RuntimeError:  # that loop is closed
                    continue
            self._idle.append(worker)

    def _grant(self, turn: asyncio.Future[_Worker], worker: _Worker) -> None:
        if turn.done():
            self.release(worker)
        else:
            turn.set_result(worker)


def _reply_size(reply: bytes) -> int:
    if not reply:
        raise ConnectionResetError("end of stream")
    if len(reply) < wire.REPLY.size:
        return wire.REPLY.size
    size = wire.REPLY.size + wire.REPLY.unpack_from(reply)[1]
    if size > _MAX_REPLY_BYTES:
        raise ConnectionResetError("not an answer")
    return int(size)


_pools: dict[tuple[int, int], _Pool] = {}


def _pool(size: int) -> _Pool:
    key = (os.getpid(), size)  # a forked child must not talk to its parent's workers
    pool = _pools.get(key)
    if pool is None:
        pool = _pools[key] = _Pool(size)
    return pool


@atexit.register
def close_reward_workers() -> None:
    """Kill all reward workers of this process; the next call starts new ones."""
    for (pid, _), pool in _pools.items():
        if pid == os.getpid():
            for worker in pool.workers:
                if worker.process is not None:
                    worker.kill().wait()
