"""One episode of an environment under check, played by a policy instead of a model."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from numbers import Real
from typing import Any
from areal_lite.config.run_config import RunConfig
from areal_lite.environments.catalog import environment_maker
from areal_lite.environments.environment import Observation, Step, ToolCall, WrongAction
from areal_lite.environments.environment_agent import EnvironmentAgent, episode_seed, text_of
from areal_lite.environments.random_player import random_action
from areal_lite.environments.random_state import OwnRandom
from areal_lite.errors import ConfigError

Action = str | list[ToolCall]
Row = dict[str, Any]


class Defect(Exception):
    """What a check found: its name, one sentence, and the fix."""


class Skipped(Exception):
    """A check does not apply to this environment; the text says why."""


class Subject:
    """The environment under check, and the episodes that were played of it; ``options`` are EnvironmentAgent's."""

    def __init__(self, options: Mapping[str, Any], rows: Sequence[Row], config: RunConfig | None = None) -> None:
        self.agent, self.rows, self.plays, self.config = EnvironmentAgent(**options), rows, list[Play](), config
        if not isinstance(env := self.agent.env, str):
            raise ConfigError(f"the config is of several environments: check each alone, {', '.join(env)}")
        self.env, self.make = env, environment_maker(env, options.get("kwargs") or {})

    @property
    def has_solution(self) -> bool:
        return hasattr(self.plays[0].environment, "solution")

    @asynccontextmanager
    async def episode(self, row: Row | None = None, **options: Any) -> "AsyncIterator[Play]":
        """Begin an episode of ``row`` (default: the first), and close it after; options as for :class:`Play`."""
        play = Play(self, row or self.rows[0], **options)
        try:
            await play.reset()
            self.plays.append(play)
            yield play
        finally:
            await self.agent.call("close", play.own, play.environment.close())

    async def play(self, policy: str, row: Row | None = None, *, max_steps: int = 50, **options: Any) -> "Play":
        """Play an episode to its end, or for ``max_steps`` answers."""
        async with self.episode(row, **options) as play:
            await play.go_on(policy, max_steps)
        return play


class Play:
    """An episode, call by call, with seed and random state as in a run, and some attributes of the environment set."""

    def __init__(
        self, subject: Subject, row: Row, own: type[OwnRandom] = OwnRandom, attributes: Sequence[tuple[str, Any]] = ()
    ) -> None:
        self._call, self.row, self.seed = subject.agent.call, row, episode_seed(subject.agent.seed, row)
        self.own, self.draw = own(self.seed), random.Random(self.seed)
        with self.own.in_place():
            self.environment: Any = subject.make()
        for name, value in attributes:
            setattr(self.environment, name, value)
        self.tools: list[dict[str, Any]] = []
        self.action: Action = ""
        self.steps: list[Step] = []  # an action that means nothing has its text alone
        self.refused = 0
        self.raised: Exception | None = None

    async def reset(self) -> None:
        seen = await self._call("reset", self.own, self.environment.reset(self.row, self.seed))
        self.tools = getattr(self.environment, "tools", list)()
        self.start = self.text = text_of(seen.messages if isinstance(seen, Observation) else seen)

    async def act(self, action: Action) -> Step:
        """Take an action; an exception ends the episode, and is kept."""
        await asyncio.sleep(0)  # so that episodes side by side take turns
        step, self.action = Step(), action
        try:
            step = await self._call("step", self.own, self.environment.step(action))
        except WrongAction as error:
            step, self.refused = Step(str(error)), self.refused + 1
        except Exception as error:
            self.raised = error
        self.steps.append(step)
        self.text = text_of(step.messages)
        return step

    async def go_on(self, policy: str, max_steps: int) -> None:
        while not self.over and len(self.steps) < max_steps:
            await self.act(POLICIES[policy](self))

    @property
    def over(self) -> bool:
        return self.raised is not None or bool(self.steps and (self.steps[-1].done or self.steps[-1].truncated))

    @property
    def rewards(self) -> list[Any]:
        """Rewards of the steps; of several seats, those of the first."""
        given = [step.reward for step in self.steps]
        return [each.get(0, 0.0) if isinstance(each, Mapping) else each for each in given]

    @property
    def reward(self) -> float:
        return sum(float(each) for each in self.rewards if isinstance(each, Real))

    @property
    def seen(self) -> list[Any]:
        """All but the rewards."""
        steps = [(step.messages, step.done, step.truncated, step.player) for step in self.steps]
        return [self.start, self.tools, *steps]


def shown(value: Any) -> str:
    """Return a short quotation."""
    return text if len(text := repr(value)) <= 60 else text[:57] + "..."


POLICIES: dict[str, Callable[[Play], Action]] = {
    "oracle": lambda play: str(play.environment.solution(play.row)),
    "empty": lambda play: "",
    "random": lambda play: random_action(play.tools, play.start, play.text, play.draw),
    "copy": lambda play: play.text,
}
