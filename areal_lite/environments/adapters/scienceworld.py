"""``scienceworld:TASK``: experiments of school science in a world of text, as ``scienceworld:boil``. A simulator is a
process of Java; it serves one episode at a time and is kept for the next."""

import asyncio
import os
import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar
from scienceworld import ScienceWorldEnv
from scienceworld.constants import ID2TASK
from areal_lite.environments.adapters.task_split import FIRST_HELD_OUT
from areal_lite.environments.environment import Step
from areal_lite.errors import ConfigError, did_you_mean

_MOST_ACTIONS = 100
# Java numbers its objects at random, and a room would list what it holds in another order to each member of a group.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:+UnlockExperimentalVMOptions -XX:hashCode=2")


class ScienceWorldTask:
    """One variation of a task, at most 100 actions: a training one, or from row 1,000,000 on a test one.

    Args:
        task: Its name, such as boil.
        simplifications: What the world leaves out, separated by commas; ``easy`` leaves out all that it can.
    """

    reward_range = -1.0, 1.0
    _idle: ClassVar[list[ScienceWorldEnv]] = []
    _starting: ClassVar[threading.Lock] = threading.Lock()
    _variations: ClassVar[dict[tuple[str, bool], list[int]]] = {}

    def __init__(self, task: str, *, simplifications: str = "easy") -> None:
        self._task, self._simplifications = task, simplifications
        self._world: ScienceWorldEnv | None = None
        self._answers, self._score, self._actions = True, 0, 0

    @staticmethod
    def check(task: str) -> None:
        """Check that there is such a task; raises ConfigError."""
        if task not in (known := list(ID2TASK.values())):
            hint = did_you_mean(task, known, f"; the tasks are {', '.join(known)}", count=3)
            raise ConfigError(f"env scienceworld:{task}: there is no such task{hint}")

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        while not self._idle:  # one that is cancelled here leaves a simulator to the others
            await asyncio.to_thread(self._start_one)
        self._world = self._idle.pop()
        return str(await self._asked(self._begin, int(row.get("number", 0)) >= FIRST_HELD_OUT, seed))

    async def step(self, action: str) -> Step:
        assert self._world is not None
        seen, _, done, about = await self._asked(self._world.step, action.rpartition("</think>")[2].strip())
        before, self._score = self._score, about["score"]  # the world's own reward leaves out what looking around gave
        self._actions += 1  # the world's own limit leaves out those that it does not understand
        cut = self._actions >= _MOST_ACTIONS
        return Step(seen, (self._score - before) / 100, bool(done) and not cut, cut, {"score": self._score})

    async def close(self) -> None:
        if self._world is not None and self._answers:
            self._idle.append(self._world)
        elif self._world is not None:
            await asyncio.to_thread(self._world.close)

    @classmethod
    def _start_one(cls) -> None:
        with cls._starting:
            if not cls._idle:
                cls._idle.append(ScienceWorldEnv())

    def _begin(self, is_held_out: bool, seed: int) -> str:
        world: Any = self._world
        if (key := (self._task, is_held_out)) not in self._variations:
            world.load(self._task, 0, self._simplifications)
            self._variations[key] = world.get_variations_test() if is_held_out else world.get_variations_train()
        world.load(self._task, random.Random(seed).choice(self._variations[key]), self._simplifications)
        seen, about = world.reset()
        actions = ", ".join(sorted(world.get_possible_actions()))
        return f"{about['taskDesc']}\n\n{seen}\n\nReply with one action. OBJ is what you see: {actions}."

    async def _asked(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Wait for the simulator in a thread; one that fails or is left waiting is not used again."""
        self._answers = False
        answer = await asyncio.to_thread(ask, *arguments)
        self._answers = True
        return answer
