"""Small environments of the tests' own."""

from __future__ import annotations
import asyncio
import os
import random
import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
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


class DrawsTools(Scripted):
    """Offers a tool with a name that it draws, and may fail at that."""

    def tools(self) -> list[dict[str, Any]]:
        if self.fails_in == "tools":
            raise KeyError("broken in tools")
        return [{"type": "function", "function": {"name": f"tool-{random.random()}", "parameters": {}}}]


class Troubled:
    """Does at once what an action says; also a game for two with a tool."""

    players = 2

    def __init__(self, closes: bool = True, text: str = "begin") -> None:
        self.closes, self.text = closes, text

    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        return Observation([{"role": "user", "content": f"{self.text} {row['number']} {seed}"}], player=1)

    async def step(self, action: Any) -> Step:
        if not isinstance(action, str):
            return Step([action[0].result(f"{action[0].arguments}")], player=0)
        action, _, begun = action.partition(" ")
        if begun and action in ("loop", "hang"):
            Path(begun).touch()  # noqa: ASYNC240
        if action == "crash":
            os._exit(3)
        while action == "loop":
            pass
        if action == "hang":
            await asyncio.Event().wait()
        if action == "raise":
            raise KeyError("broken")
        if action == "wrong":
            raise WrongAction("say something else")
        info: dict[Any, Any] = {"pid": os.getpid(), "lock": threading.Lock(), (1, 2): 3}
        info |= {"key": os.environ.get("OPENAI_API_KEY"), "first": next(iter({"plum", "pear", "nut", "fig", "date"}))}
        return Step(f"pid {os.getpid()}", reward={np.int64(0): 0.25, 1: 0.5}, truncated=True, info=info)

    async def close(self) -> None:
        if not self.closes:
            raise OSError("cannot close")


class Starts(Troubled):
    """Starts the program that an action names, and says how it ended."""

    async def step(self, action: Any) -> Step:
        done = await asyncio.create_subprocess_exec(*shlex.split(action))
        return Step(str(await done.wait()))


def shout(seen: Any) -> str:
    return f"AT {seen}!"


def always_down(text: str) -> int:
    return 1


class Kuhn:
    """Kuhn poker: a card of three each, an ante of 1, one bet of 1; a text bets, or calls, as :func:`bets` says.

    The value of the first seat between perfect players is -1/18.
    """

    players = 2

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self.cards = random.Random(seed).sample(range(3), 2)
        self.history = ""
        return Observation(kuhn_view(self.cards[0], ""))

    async def step(self, action: Any) -> Step:
        self.history += "b" if bets(action) else "p"
        if (won := kuhn_reward(self.cards, self.history)) is not None:
            return Step(reward={0: won, 1: -won}, done=True)
        seat = len(self.history) % 2
        return Step(kuhn_view(self.cards[seat], self.history), player=seat)

    async def close(self) -> None:
        pass


def bets(text: str) -> bool:
    return sum(text.encode()) % 2 == 1


def kuhn_view(card: int, history: str) -> str:
    return "JQK"[card] * 8 + " " + history * 8


def kuhn_reward(cards: Sequence[int], history: str) -> float | None:
    """Return what the first seat wins; None before the end."""
    if history in ("bp", "pbp"):
        return 1.0 if history == "bp" else -1.0
    if history in ("pp", "bb", "pbb"):
        return (1.0 if history == "pp" else 2.0) * (1 if cards[0] > cards[1] else -1)
    return None
