"""Small environments of the tests' own."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np

from areal_lite.environments import Observation, Step, ToolCall, WrongAction


class Dice:
    """Draws from the process-wide random states, before and after it waits."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self.seen = [random.random()]
        await asyncio.sleep(0)
        self.seen.append(float(np.random.random()))
        return f"{self.seen}"

    async def step(self, action: Any) -> Step:
        self.seen.append(random.random())
        await asyncio.sleep(0)
        self.seen.append(float(np.random.random()))
        self.turns -= 1
        return Step(f"{self.seen}", reward=self.seen[-1], done=self.turns == 0)

    async def close(self) -> None:
        pass


class Scripted:
    """Does what its arguments say; ``calls`` has what happened."""

    def __init__(self, steps: list[Any], tools: list[str] = [], players: int = 1, fails_in: str = "") -> None:  # noqa: B006
        self.steps, self.names, self.players, self.fails_in = iter(steps), tools, players, fails_in
        self.calls: list[Any] = []

    def tools(self) -> list[dict[str, Any]]:
        parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        return [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in self.names]

    async def reset(self, row: dict[str, Any], seed: int) -> Observation | str:
        self.calls.append(("reset", row, seed))
        await self._fail("reset")
        return "begin"

    async def step(self, action: str | list[ToolCall]) -> Step:
        self.calls.append(action)
        await self._fail("step")
        step = next(self.steps)
        if isinstance(step, str):
            raise WrongAction(step)
        return step  # type: ignore[no-any-return]

    async def close(self) -> None:
        self.calls.append("close")
        await self._fail("close")

    async def _fail(self, name: str) -> None:
        if self.fails_in == name:
            raise KeyError(f"broken in {name}")
        if self.fails_in == f"{name} hangs":
            await asyncio.Event().wait()


def shout(seen: Any) -> str:
    return f"AT {seen}!"


def always_down(text: str) -> int:
    return 1
