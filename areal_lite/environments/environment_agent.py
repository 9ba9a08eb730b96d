"""The agent that plays any environment: the loop between model and environment, written once.

The model's wrong tool arguments and wrong actions are answered, and it acts again. A limit of turns truncates. What the
environment raises, or does not answer in time, fails the episode with the kind ``environment``.
"""

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from numbers import Real
from typing import Any, TypeVar
from openai import AsyncOpenAI
from areal_lite.api.engine_api import OLDER_POLICY
from areal_lite.api.episode_context import record_counts
from areal_lite.api.failure import FailureKind, attributed_to
from areal_lite.environments.catalog import environment_maker
from areal_lite.environments.environment import Environment, Messages, Observation, Step, ToolCall, WrongAction
from areal_lite.environments.environment_process import ProcessEnvironment, interpreter_of, pickled_host
from areal_lite.environments.random_player import random_action
from areal_lite.environments.random_state import OwnRandom
from areal_lite.errors import ConfigError

T = TypeVar("T")
OPPONENTS = ("self", "older", "random")
_RETURNS: dict[str, Any] = {"reset": Observation | str | list, "step": Step, "close": object}


@dataclass(eq=False)
class EnvironmentAgent:
    """Plays the environment of a row until it is done; the rewards are those of the answers, one by one.

    In a game of several players each seat has its own conversation. One seat trains, the same for all members of a
    group, as it follows from the row; ``opponent`` plays the others.
    """

    env: str | Sequence[str]
    """PREFIX:NAME, or the dotted path of an environment's class; of a list, the row's column ``env`` names one."""
    _: KW_ONLY
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment; with a list, those of each by its name."""
    opponent: str | Sequence[str] = "self"
    """Who plays the other seats of a game: self, the policy; older, its older version (``older_policy``); random, words
    and brackets of what it reads; or a server with OpenAI's API, http://HOST:PORT/v1. Of a list, the row chooses."""
    max_turns: int = 30
    """Answers per episode, of all players; then it is truncated."""
    wrong_action_reward: float = 0.0
    """Reward of an answer that means nothing: where each step costs, the same, or a model learns to make no move."""
    system_prompt: str | None = None
    """First message of every conversation."""
    timeout_s: float = 60.0
    """Limit on one call of the environment, in seconds. Inline, code that never awaits cannot be interrupted."""
    seed: int = 1
    """The run's seed. That of an episode follows from it and the row."""
    isolation: str = "inline"
    """Where the environment runs: inline, process (of this interpreter), or python:PATH (of another one)."""
    processes: int | None = None
    """Maximum number of its processes, each for one episode at a time; further episodes wait. None: two per core."""
    lease_s: float = 3600.0
    """Seconds after which an episode's process is killed, so that none is lost to an episode that hangs."""
    idle_s: float = 600.0
    """Seconds after which an unused process is ended."""
    uses: int | None = 1000
    """Episodes after which a process is replaced, with what its libraries keep; None keeps it."""

    def __post_init__(self) -> None:
        self.opponents = [self.opponent] if isinstance(self.opponent, str) else list(self.opponent)
        for each in self.opponents:
            if each not in OPPONENTS and not each.startswith(("http://", "https://")):
                choices = f"{', '.join(OPPONENTS)} or http://HOST:PORT/v1"
                raise ConfigError(f"workflow_kwargs.opponent is {each!r}: write {choices}")
        for name in ("max_turns", "timeout_s", "processes", "lease_s", "idle_s", "uses"):
            value, is_optional = getattr(self, name), name in ("processes", "uses")
            if not (is_optional and value is None or isinstance(value, int | float) and value > 0):
                raise ConfigError(f"workflow_kwargs.{name} is {value!r}: it must be a number above 0")
        self._python = interpreter_of(self.isolation)
        self._make: dict[str, Any] = {
            name: environment_maker(name, own) if self._python is None else pickled_host(name, own, self._python)
            for name, own in _by_name(self.env, self.kwargs).items()
        }
        """What makes the environment of each name, here or in a process."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> list[float | None] | None:
        """Run one episode and return the reward of each answer, None for one that does not train; None alone, which
        rejects the episode, if the trained seat never acted."""
        seed = episode_seed(self.seed, data)
        own = OwnRandom(seed)
        with attributed_to(FailureKind.ENVIRONMENT):
            environment = await self._made(own, seed, self.env if isinstance(self.env, str) else data["env"])
        try:
            seen = await self.call("reset", own, environment.reset(data, seed))
            with attributed_to(FailureKind.ENVIRONMENT), own.in_place():
                game = _Game(self, environment, seen if isinstance(seen, Observation) else Observation(seen), seed)
            rewards = await game.play(AsyncOpenAI(**extra_kwargs), own)
        finally:
            await self.call("close", own, environment.close())
        return rewards if any(reward is not None for reward in rewards) else None

    async def _made(self, own: OwnRandom, seed: int, env: str) -> Environment:
        make = self._make[env]
        if self._python is not None:
            return await ProcessEnvironment.make(self, make, self._python, seed)
        with own.in_place():
            environment: Environment = make()
            return environment

    async def call(self, name: str, own: OwnRandom, call: Coroutine[Any, Any, T]) -> T:
        """Await a method of the environment: with its random state, within its time, its errors attributed."""
        with attributed_to(FailureKind.ENVIRONMENT):
            if not asyncio.iscoroutine(call):
                raise TypeError(f"{name}() of env {self.env} is no coroutine: write `async def {name}`")
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    result = await own.run(call)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise TimeoutError(
                    f"{name}() of env {self.env} took longer than timeout_s {self.timeout_s:g}: look at what it waits "
                    "for, or raise it in workflow_kwargs"
                ) from error
            if not isinstance(result, _RETURNS[name]):
                kind = "a Step" if name == "step" else "a text, messages or an Observation"
                raise TypeError(f"{name}() of env {self.env} must return {kind}, not {result!r:.80}")
            return result


class _Game:
    """One episode: a conversation for each seat, and the rewards of the trained one by recorded answer."""

    def __init__(self, agent: EnvironmentAgent, environment: Environment, seen: Observation, seed: int) -> None:
        seats = getattr(environment, "players", 1)
        self.agent, self.environment = agent, environment
        self.trained, self.seat = seed % seats, seen.player
        self.opponent, self.draw = agent.opponents[seed // seats % len(agent.opponents)], random.Random(seed)
        offered: Callable[[], list[dict[str, Any]]] = getattr(environment, "tools", list)
        self.tools = offered()
        first = [] if agent.system_prompt is None else [{"role": "system", "content": agent.system_prompt}]
        self.talks: list[list[Any]] = [[*first] for _ in range(seats)]
        self.talks[self.seat] += as_messages(seen.messages)
        self.rewards: list[float | None] = []

    async def play(self, client: AsyncOpenAI, own: OwnRandom) -> list[float | None]:
        step, answers = Step(player=self.seat), 0
        async with AsyncExitStack() as stack:
            opponent = client
            if self.opponent.startswith("http"):
                opponent = await stack.enter_async_context(AsyncOpenAI(base_url=self.opponent, api_key="none"))
                with attributed_to(FailureKind.ENVIRONMENT):
                    self.model = (await opponent.models.list()).data[0].id
            while not (step.done or step.truncated):
                action = await self.answer(client if self.seat == self.trained else opponent)
                with attributed_to(FailureKind.ENVIRONMENT):
                    step = await self.act(own, action)
                    self.keep(step)
                if (answers := answers + 1) >= self.agent.max_turns:
                    step = replace(step, truncated=True)
        facts = {name: float(value) for name, value in step.info.items() if isinstance(value, Real)}
        facts |= {"turns": answers, "truncated": float(not step.done)}
        record_counts({f"environment/{name}": value for name, value in facts.items() if math.isfinite(value)})
        return self.rewards

    async def answer(self, client: AsyncOpenAI) -> str | list[ToolCall]:
        """Return the action of whoever plays the seat; what the model does not understand is answered."""
        talk, is_trained = self.talks[self.seat], self.seat == self.trained
        tools: dict[str, Any] = {"tools": self.tools} if self.tools else {}
        if is_trained or self.opponent in ("self", "older"):
            name = OLDER_POLICY if self.opponent == "older" and not is_trained else f"seat-{self.seat}"
            if len(self.talks) > 1:
                tools["metadata"] = {"agent": name}
            completion = await client.chat.completions.create(model="default", messages=talk, **tools)
            self.rewards.append(0.0 if is_trained else None)
        elif self.opponent == "random":
            read = [text_of([each]) for each in talk]
            return random_action(self.tools, read[0] if read else "", read[-1] if read else "", self.draw)
        else:
            with attributed_to(FailureKind.ENVIRONMENT):
                completion = await client.chat.completions.create(model=self.model, messages=talk, **tools)
        talk.append(completion.choices[0].message)
        action, problems = read_action(completion.choices[0].message, self.tools)
        talk += problems
        return action

    async def act(self, own: OwnRandom, action: str | list[ToolCall]) -> Step:
        """Take an action; one that means nothing is answered."""
        wrong = Step([], self.agent.wrong_action_reward, player=self.seat)
        if action == []:
            return wrong
        try:
            step = await self.agent.call("step", own, self.environment.step(action))
        except WrongAction as error:
            step = replace(wrong, messages=str(error))
        if isinstance(action, list) and isinstance(step.messages, str):
            step = replace(step, messages=[call.result(step.messages) for call in action])
        return step

    def keep(self, step: Step) -> None:
        """Add a step's rewards to the latest answer of the trained seat, and its messages to the next conversation."""
        rewards = step.reward if isinstance(step.reward, Mapping) else {self.seat: step.reward}
        for place in reversed(range(len(self.rewards))):
            if (so_far := self.rewards[place]) is not None:
                self.rewards[place] = so_far + float(rewards.get(self.trained, 0.0))
                break
        self.seat = step.player
        self.talks[self.seat] += as_messages(step.messages)


def _by_name(env: str | Sequence[str], kwargs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the arguments of each environment; raises ConfigError."""
    if isinstance(env, str):
        return {env: kwargs}
    if unknown := kwargs.keys() - {*env}:
        raise ConfigError(
            f"workflow_kwargs.kwargs has {', '.join(sorted(unknown))}: of several environments it has the arguments of "
            f"each by its name, {', '.join(env)}"
        )
    return {name: kwargs.get(name, {}) for name in env}


def episode_seed(run_seed: int, row: Mapping[str, Any]) -> int:
    """Return the seed of a row's episodes, 31 bits: equal for all members of its group, and when it is drawn again."""
    text = json.dumps([run_seed, row], sort_keys=True, default=lambda value: type(value).__name__)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


def as_messages(messages: Messages) -> list[dict[str, Any]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def text_of(messages: Messages) -> str:
    return "\n".join(str(message.get("content")) for message in as_messages(messages))


def read_action(message: Any, tools: list[dict[str, Any]]) -> tuple[str | list[ToolCall], list[dict[str, Any]]]:
    """Return the action in an answer, and a message for each tool call that cannot be made."""
    if not (tools and message.tool_calls):
        return message.content or "", []
    parameters = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    calls, problems = [], []
    for one in message.tool_calls:
        call, problem = ToolCall(one.id, one.function.name, {}), ""
        try:
            call = call._replace(arguments=json.loads(one.function.arguments or "{}"))
        except (ValueError, RecursionError) as error:
            problem = f"the arguments are not JSON: {error}"
        if call.name not in parameters:
            problem = f"there is no tool {call.name!r}; the tools are {', '.join(parameters)}"
        elif not isinstance(call.arguments, dict):
            problem = "the arguments must be a JSON object"
        elif missing := [name for name in parameters[call.name].get("required", ()) if name not in call.arguments]:
            problem = problem or f"{call.name} needs {', '.join(missing)}"
        if problem:
            problems.append(call.result(f"Error: {problem}"))
        else:
            calls.append(call)
    return calls, problems
