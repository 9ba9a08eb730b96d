"""An environment in a process of a pool: of this interpreter, or of another one with packages of its own.

Guarantees that a process plays one episode at a time; that an episode sees what it would see inline, random numbers
included; and that a process which died, was killed at a limit, or could not close its environment is not used again.
Answers come back as plain data, so what has no JSON form in ``info`` or in messages becomes its ``repr``.
"""

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol
from areal_lite.api import episode_context
from areal_lite.environments.catalog import environment_maker
from areal_lite.environments.environment import Environment, Observation, Step, ToolCall, WrongAction
from areal_lite.environments.random_state import OwnRandom
from areal_lite.errors import ConfigError
from areal_lite.processes.call_pool import LOAD_S, CallPool, Slot, shared_pool
from areal_lite.processes.child_process import PickledObject, main_command, pickled_object
from areal_lite.processes.sandbox import BUBBLEWRAP, ProcessLimits, bubblewrap


class EnvironmentHost:
    """The process's side: plays one episode after the other. It is pickled before its first."""

    _environment: Environment

    def __init__(self, env: str, kwargs: Mapping[str, Any]) -> None:
        self._env, self._kwargs = env, kwargs

    def __call__(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def make(self, seed: int) -> None:
        self._own, self._runner = OwnRandom(seed), asyncio.Runner()
        with self._own.in_place():
            self._environment = environment_maker(self._env, self._kwargs)()

    def reset(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        seen = self._run(self._environment.reset(row, seed))
        offered: Any = getattr(self._environment, "tools", list)
        with self._own.in_place():
            about = {"players": getattr(self._environment, "players", 1), "tools": offered()}
        return {"seen": _fields(seen if isinstance(seen, Observation) else Observation(seen)), **about}

    def step(self, action: str | list[ToolCall]) -> dict[str, Any] | str:
        """Return the fields of a step, or the text of a WrongAction."""
        try:
            step = _fields(self._run(self._environment.step(action)))
        except WrongAction as error:
            return str(error)
        by_name = {name: step[name] for name in ("reward", "info") if isinstance(step[name], Mapping)}
        return step | {name: {str(key): value for key, value in each.items()} for name, each in by_name.items()}

    def close(self) -> None:
        with self._runner:  # its end cancels what the environment left on the loop
            self._run(self._environment.close())

    def _run(self, coroutine: Any) -> Any:
        return self._runner.run(self._own.run(coroutine))


def _fields(made: Any) -> dict[str, Any]:
    return {each.name: getattr(made, each.name) for each in fields(made)}  # asdict copies, and not everything can be


class Leases(Protocol):
    """Settings of an agent, which documents them."""

    processes: int | None
    lease_s: float
    idle_s: float
    uses: int | None


class ProcessEnvironment:
    """The run's side: an environment whose methods are calls in a leased process."""

    players = 1

    def __init__(self, agent: Leases, pool: CallPool, slot: Slot, host: PickledObject) -> None:
        self._agent, self._pool, self._slot, self._host = agent, pool, slot, host
        self._retire_after(agent.lease_s, slot.leases, f"it was lent for lease_s {agent.lease_s:g}, which is over")

    @classmethod
    async def make(cls, agent: Leases, host: PickledObject, python: str, seed: int) -> "ProcessEnvironment":
        """Wait for a process, however long others play there, and make the agent's environment in it."""
        box = box_around(episode_context.current().agent, python)
        pool = shared_pool(agent.processes or 2 * (os.cpu_count() or 1), python=[*box, python])
        made = cls(agent, pool, slot := await pool.lease(), host)
        try:
            if not slot.is_warm:
                slot.kill()  # it may have died while nobody used it
            slot.uses += 1
            await made._call("make", seed, timeout_s=LOAD_S)
        except BaseException:
            pool.release(slot, reuse=False)
            raise
        return made

    def _retire_after(self, seconds: float, lease: int, why: str) -> None:
        asyncio.get_running_loop().call_later(seconds, self._pool.retire, self._slot, lease, why)

    async def _call(self, *args: Any, timeout_s: float | None = None) -> Any:
        return await self._slot.call(self._host, pickle.dumps((args, {})), timeout_s)

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        made = await self._call("reset", row, seed)
        self.players, self.tools = made["players"], lambda: made["tools"]
        return Observation(**made["seen"])

    async def step(self, action: str | list[ToolCall]) -> Step:
        made = await self._call("step", action)
        if isinstance(made, str):
            raise WrongAction(made)
        if isinstance(made["reward"], dict):
            made["reward"] = {int(seat): reward for seat, reward in made["reward"].items()}
        return Step(**made)

    async def close(self) -> None:
        """Give the process back; it is killed if the environment cannot close."""
        reuse, lease = False, self._slot.leases
        try:
            if self._slot.is_warm:  # else the episode has failed by the reason
                await self._call("close")
                reuse = self._slot.uses != self._agent.uses
        finally:
            self._pool.release(self._slot, reuse=reuse)
        self._retire_after(self._agent.idle_s, lease, "it was idle")


def box_around(access: Any, python: str = sys.executable) -> list[str]:
    """Return what is put before the command of a server that an episode starts with its ``AgentAccess``. In the box the
    server reads the working directory, ``python`` and what this process imports."""
    sandbox = getattr(access, "sandbox", "none")
    if sandbox == "none":
        return []
    if sandbox != BUBBLEWRAP:
        raise ConfigError(f"rollout.agents.sandbox is {sandbox}: only bubblewrap can be put around an environment")
    here = str(Path.cwd())
    paths = dict.fromkeys([here, *filter(os.path.isabs, sys.path), str(Path(__file__).parents[2])])
    folder = [part for path in paths for part in ("--ro-bind-try", path, path)]
    return bubblewrap([*folder, "--chdir", here], [sys.executable, python], ProcessLimits())


def interpreter_of(isolation: str) -> str | None:
    """Return the Python that runs environments, None for this process; raises ConfigError."""
    kind, _, path = isolation.partition(":")
    if kind == "python" and path.strip():
        return str(Path(path.strip()).expanduser().absolute())
    if isolation not in ("inline", "process"):
        raise ConfigError(
            f"workflow_kwargs.isolation is {isolation!r}: it is inline, process or python:PATH; an environment on "
            "another machine is env: openenv:URL or mcp:URL"
        )
    return sys.executable if isolation == "process" else None


def pickled_host(env: str, kwargs: Mapping[str, Any], python: str) -> PickledObject:
    """Return what an interpreter needs to play an environment, after a look whether it can; raises ConfigError."""
    host = pickled_object(EnvironmentHost(env, kwargs), name=f"env {env}", hint="Give it plain values as kwargs")
    if python == sys.executable:
        environment_maker(env, kwargs)
        return host
    try:
        check = main_command(__name__, env, python=[python])
        subprocess.run(check, check=True, capture_output=True, text=True, timeout=LOAD_S)
    except (OSError, subprocess.SubprocessError) as error:
        last = (getattr(error, "stderr", "") or str(error)).strip().rpartition("\n")[2]
        raise ConfigError(
            f"workflow_kwargs.isolation is python:{python}, which cannot play env {env}: {last}. It needs Python 3.11, "
            "numpy, pydantic and the packages of the environment"
        ) from None
    return host._replace(preparation={})  # this interpreter's import paths are not for others


def main(env: str) -> None:
    """Raise if this interpreter cannot import what the environment needs."""
    environment_maker(env, {})
