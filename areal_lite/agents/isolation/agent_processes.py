"""A pool of processes that run agents, each one episode at a time.

Guarantees that a process whose episode was stopped is killed, with all processes of its group, and replaced.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import os
import pickle
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from areal_lite.agents.isolation import agent_worker as wire
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.api.failure import add_hint
from areal_lite.api.trajectory import ProcessRecord
from areal_lite.processes.child_process import PickledObject, pickled_object, start_tied

_MAX_REPLY_BYTES = 64 * 2**20


def pickled_agent(agent: Any) -> PickledObject:
    """Return what a process needs to load ``agent``.

    Raises:
        ConfigError: If it cannot be pickled.
    """
    hint = (
        "Define its class at the top level of a module and make clients, locks and files in run(), or set "
        "rollout.agents.isolation: thread"
    )
    return pickled_object(agent, name=f"agent {type(agent).__name__}", hint=hint)


class AgentProcesses:
    """The processes of one engine; lives on one event loop.

    Args:
        size: Maximum number of processes; None is two per core.
    """

    def __init__(self, size: int | None) -> None:
        self._free = asyncio.Semaphore(size or 2 * (os.cpu_count() or 1))
        self._idle: list[_Process] = []

    async def run(
        self, agent: PickledObject, data: dict[str, Any], access: AgentAccess, context: EpisodeContext
    ) -> Any:
        """Return the reward of one episode; what its agent ran and recorded is added to the context's episode.

        Raises:
            Exception: What ``run()`` raised: the builtin class, or one of the same name; its cause has the traceback.
            RuntimeError: If the process died.
        """
        keys = ("is_eval", "task_id", "group_id", "member_idx", "version")
        job = {
            "data": data,
            "access": {
                "base_url": access.base_url,
                "anthropic_base_url": access.anthropic_base_url,
                "api_key": access.api_key,
            },
            "context": {key: getattr(context, key) for key in keys},
        }
        message = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        async with self._free:
            process = self._idle.pop() if self._idle else _Process()
            try:
                reply = await process.run(agent, message)
            except BaseException:
                process.kill()
                raise
            self._idle.append(process)
        if context.episode is not None:
            context.episode.processes += [ProcessRecord(**record) for record in reply["processes"]]
            context.episode.reward_extra |= reply["facts"]
            context.episode.scalars += [(name, value) for name, value in reply["scalars"]]
        if "error" in reply:
            raise _rebuilt(*reply["error"])
        return reply["reward"]

    async def aclose(self) -> None:
        """Kill all processes."""
        while self._idle:
            self._idle.pop().kill()


class _Process:
    """A child process; the leader of its process group."""

    def __init__(self) -> None:
        self._loaded: set[bytes] = set()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process, self._held_open = start_tied(
                [sys.executable, "-P", str(Path(wire.__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )

    async def run(self, agent: PickledObject, job: bytes) -> dict[str, Any]:
        """Run one job and return its reply."""
        loop = asyncio.get_running_loop()
        load = (None, None) if agent.key in self._loaded else (agent.preparation, agent.pickled)
        message = pickle.dumps((agent.key, *load, job), pickle.HIGHEST_PROTOCOL)
        try:
            await loop.sock_sendall(self._socket, wire.LENGTH.pack(len(message)) + message)
            (size,) = wire.LENGTH.unpack(await self._read(wire.LENGTH.size))
            if size > _MAX_REPLY_BYTES:
                raise ConnectionResetError("not an answer")
            reply: dict[str, Any] = json.loads(await self._read(size))
        except OSError as error:
            raise RuntimeError(f"the agent's process died before run() returned ({type(error).__name__})") from None
        if reply["loaded"]:
            self._loaded.add(agent.key)
        return reply

    async def _read(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < size:
            piece = await loop.sock_recv(self._socket, min(1 << 20, size - len(data)))
            if not piece:
                raise ConnectionResetError("end of stream")
            data += piece
        return bytes(data)

    def kill(self) -> None:
        """Kill the process and its group."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its leader is not reaped yet, so the group is there
        os.close(self._held_open)
        # Gigabytes take the kernel a while to free; the event loop must not wait for it.
        threading.Thread(target=self._process.wait).start()


class AgentTraceback(Exception):
    """The traceback of an exception in another process."""


def _rebuilt(name: str, message: str, text: str, kind: str | None, hint: str) -> Exception:
    """Return the exception that an agent raised in its process."""
    known = getattr(builtins, name, None)
    error: Any = None
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError and its like take more than a text
            error = known(message)
    if error is None:
        error = type(name, (RuntimeError,), {})(message)
    if kind is not None:
        error.failure_kind = kind
    add_hint(error, hint)
    error.__cause__ = AgentTraceback(f"in the agent's process:\n{text}")
    rebuilt: Exception = error
    return rebuilt
