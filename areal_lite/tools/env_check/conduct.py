"""Does an environment keep to the protocol: repeatable, ended, callable as it says, and without traces?"""

import asyncio
import contextlib
import gc
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any
from areal_lite.environments.environment import ToolCall
from areal_lite.environments.random_player import tool_call
from areal_lite.environments.random_state import OwnRandom
from areal_lite.tools.env_check.play import Defect, Skipped, Subject, shown

_MAX_STEPS = 1000
_LIMIT, _CUT = re.compile(r"_*(max_\w+|\w+_limit|horizon)", re.I), re.compile(r"truncated|time_?limit", re.I)
_ROUNDS = 4
"""Rounds of cancelled episodes. A leak grows with each; what grows once is shared by all episodes."""
_BLOCKING = {"accept", "acquire", "connect", "poll", "recv", "recv_into", "select", "sleep", "waitpid"}
"""Functions in C that wait for something outside of the event loop."""
_BLOCKED_S, _COMPUTED_S = 0.05, 1.0


async def begins(subject: Subject) -> None:
    await subject.play("empty", max_steps=0)


async def repeats(subject: Subject) -> None:
    """Play the same episodes again, after others, and side by side. One cause makes several of these differ, so only
    the first difference is a defect."""
    seeded = "draw from random.Random(seed) of reset, and let neither the clock nor the order of a set decide"
    own = "keep what belongs to an episode on the object, which is made for each, not on the class or in the module"
    solved = [("oracle", 50)] if subject.has_solution else []
    for policy, steps in [("empty", 0), ("random", 50), ("empty", 50), *solved]:
        kept = _kept(subject)
        plays = [await subject.play(policy, max_steps=steps) for _ in range(3)]
        unlike, rewarded = _difference(play.seen for play in plays), _difference(play.rewards for play in plays)
        if (differ := unlike or rewarded) and _kept(subject) != kept:
            raise Defect("state", f"an episode changes the next one of the same row and seed: {differ}", own)
        if unlike and not steps:
            raise Defect("starts", f"the members of a group begin differently: {unlike}", seeded)
        if unlike:
            raise Defect("seeds", f"the same row, seed and actions go on differently: {unlike}", seeded)
        if rewarded:
            fix = "judge by rules, or by a model at temperature 0 and of a fixed version"
            raise Defect("verifier", f"the same {policy} answers are rewarded differently: {rewarded}", fix)
    alone = [await subject.play("random", row) for row in subject.rows[:2]]
    async with asyncio.TaskGroup() as tasks:
        together = [tasks.create_task(subject.play("random", row)) for row in subject.rows[:2]]
    for pair in zip(alone, (task.result() for task in together), strict=True):
        if differ := _difference([*play.seen, *play.rewards] for play in pair):
            raise Defect("interleaving", f"two episodes side by side disturb each other: {differ}", own)


def _kept(subject: Subject) -> str:
    """Return the plain values of the environment's class and of its module."""
    made, plain = type(subject.plays[0].environment), (int, float, str, list, dict, set)
    values = [*vars(sys.modules[made.__module__]).items(), *vars(made).items()]
    return repr([(name, value) for name, value in values if not name.startswith("__") and isinstance(value, plain)])


def _difference(versions: Iterable[list[Any]]) -> str:
    """Quote the first place where a version is not like the first one; empty if they are equal."""
    first, *others = versions
    pairs = [pair for other in others for pair in zip_longest(first, other) if repr(pair[0]) != repr(pair[1])]
    return f"{shown(pairs[0][0])}, then {shown(pairs[0][1])}" if pairs else ""


async def ends(subject: Subject) -> None:
    """Check that random actions end an episode, and that the last one again is not taken."""
    async with subject.episode() as play:
        await play.go_on("random", _MAX_STEPS)
        if not play.over:
            if 2 * play.refused > _MAX_STEPS:
                raise Skipped(f"{play.refused} of {_MAX_STEPS} random answers meant nothing, and no episode ended")
            fix = "end it by a rule (done), or after a number of steps (truncated)"
            raise Defect("ends", f"{_MAX_STEPS} random actions do not end an episode", fix)
        if play.raised is None and play.steps[-1].done:
            refused, step = play.refused, await play.act(play.action)
            raised, play.raised = play.raised, None
            if not (raised or step.done or play.refused > refused):
                fix = "raise RuntimeError in step once the episode is done"
                raise Defect("after the end", "a step after the end goes on as if there were none", fix)


async def truncation(subject: Subject) -> None:
    """Check that a limit of steps is not ``done``: by the facts of last steps, and by limits that are moved."""
    fix = "return Step(..., truncated=True) where a limit cuts the episode"
    for step in [play.steps[-1] for play in subject.plays if play.steps]:
        names = [name for name, value in step.info.items() if value is True and _CUT.search(name)]
        if names and step.done and not step.truncated:
            raise Defect("truncation", f"the last step is done, and its info has {names[0]}", fix)
    environment = subject.plays[0].environment
    attributes = vars(type(environment)) | getattr(environment, "__dict__", {})
    for name in [name for name, value in attributes.items() if _LIMIT.fullmatch(name) and type(value) is int]:
        short, long = [await subject.play("random", attributes=[(name, limit)]) for limit in (2, 3)]
        if short.steps[-1].done and long.steps[-1].done and len(long.steps) == len(short.steps) + 1:
            raise Defect("truncation", f"an episode is done after {name} steps, whatever happened", fix)


async def raises(subject: Subject) -> None:
    """Check that nothing so far made ``step`` raise; :func:`schema` checks an episode's first call."""
    for play in subject.plays:
        if play.raised is not None and (isinstance(play.action, str) or len(play.steps) > 1):
            text = f"step raises {play.raised!r:.80} on {shown(play.action)}"
            raise Defect("raises", text, "raise WrongAction for what a model may write: it reads the text")


async def schema(subject: Subject) -> None:
    """Check that ``step`` takes each tool with what its schema says, and needs no more."""
    if not (tools := subject.plays[0].tools):
        raise Skipped("it has no tools")
    _, unknown = await _tried(subject, ToolCall("call_0", "no_such_tool", {}))
    for tool in tools:
        parameters, name = tool["function"].get("parameters", {}), tool["function"]["name"]
        needed = set(parameters.get("required", ()))
        if missing := needed - set(parameters.get("properties", {})):
            raise Defect("schema", f"{name} requires {missing}, which its schema does not have", "add it to properties")
        call = tool_call(tool, subject.plays[0].draw)
        fewer = call._replace(arguments={key: call.arguments[key] for key in call.arguments.keys() & needed})
        outcome, text = await _tried(subject, call)
        if outcome and text.replace(name, "") == unknown.replace("no_such_tool", ""):
            raise Defect("schema", f"step has no tool {name}: {shown(text)}", "let tools() list what step takes")
        if outcome == "fails":
            fix = "take what the schema allows, or raise WrongAction"
            raise Defect("schema", f"step fails on {name}{call.arguments}: {shown(text)}", fix)
        if not outcome and (await _tried(subject, fewer))[0]:
            raise Defect("schema", f"{name} needs more than the required {needed}", "add it to required")


async def _tried(subject: Subject, call: ToolCall) -> tuple[str, str]:
    """Return how a call goes, empty if well, and what is said."""
    async with subject.episode() as play:
        step = await play.act([call])
    if play.raised is not None:
        return "fails", repr(play.raised)
    answers = [] if isinstance(step.messages, str) or step.done else step.messages
    if answers and call.id not in [message.get("tool_call_id") for message in answers]:
        return "fails", "no message answers it"
    return "is refused" if play.refused else "", play.text


async def blocking(subject: Subject) -> None:
    """Check that the code of an episode neither waits nor computes long without ``await``."""
    plays = [await subject.play("random", own=_Watched) for _ in range(2)]
    if found := set.intersection(*(play.own.found for play in plays if isinstance(play.own, _Watched))):
        fix = "await it, or put it in asyncio.to_thread, or set rollout.agents.isolation: process"
        raise Defect("blocking", f"{' and '.join(sorted(found))} stops all other episodes meanwhile", fix)


class _Watched(OwnRandom):
    """Notes what the event loop waits for while an episode's code runs."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.found: set[str] = set()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        with super().in_place():
            before, began = sys.getprofile(), time.thread_time()
            sys.setprofile(self._on_call)
            try:
                yield
            finally:
                sys.setprofile(before)
                if time.thread_time() - began > _COMPUTED_S:
                    self.found.add("long computing")

    def _on_call(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call":
            self._began = time.perf_counter()
        elif event == "c_return" and time.perf_counter() - self._began > _BLOCKED_S and function.__name__ in _BLOCKING:
            self.found.add(f"{function.__name__}() in {frame.f_code.co_name}()")


async def leaks(subject: Subject) -> None:
    """Cancel episodes at several moments: nothing of them may remain."""
    held = []
    for _ in range(_ROUNDS + 1):
        for turns in range(1, 8):
            task, played = asyncio.create_task(subject.play("random")), len(subject.plays)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            del subject.plays[played:], task
        held.append(_held())
    for _ in range(10):
        names = [name for name, count in _held().items() if count >= held[0][name] + _ROUNDS]
        if not names:
            return
        await asyncio.sleep(0.05)  # programs and threads take a while to end, and nothing says when
    fix = "end in close, which is always called, whatever reset and step began"
    raise Defect("leaks", f"cancelled episodes leave {' and '.join(names)} behind", fix)


def _held() -> dict[str, int]:
    gc.collect()
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")]
    files = [*Path("/proc/self/fd").iterdir()]
    return {"tasks": len(asyncio.all_tasks()), "threads": len(threads), "open files": len(files)}
