"""Do rewards say how good an answer is, and can a model have them without a solution?"""

import builtins
import io
import json
import math
import os
import re
import subprocess
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any
from unittest.mock import patch
from areal_lite.environments.random_player import tool_call
from areal_lite.tools.env_check.play import POLICIES, Defect, Play, Skipped, Subject, shown

_LABELLED = r"(?i)\b(?:answer|solution|target|expected|truth|label|secret)\b\W{0,12}(?:is\W{1,4})?"
_CANARY = Path("areal-lite-env-check")
_PATH, _TEXT = re.compile(r"path|file|dest", re.I), re.compile(r"content|text|data|body", re.I)


async def answers(subject: Subject) -> None:
    """Compare the environment's own solutions with policies that know none."""
    if not subject.has_solution:
        raise Skipped("it has no solution(row)")
    own = [await subject.play("oracle", row) for row in subject.rows]
    others = {}
    for policy in ("empty", "random", "copy"):
        others[policy] = [await subject.play(policy, play.row, max_steps=len(play.steps)) for play in own]
        for best, other in zip(own, others[policy], strict=True):
            if other.reward > best.reward or (policy == "empty" and best.reward == other.reward <= 0):
                text = f"solution(row) {shown(best.action)} gets {best.reward:g}, and {policy} answers {other.reward:g}"
                raise Defect("oracle", text, "return an answer of full reward in the form that step reads")
    for policy in ("empty", "random"):
        equal = [best.reward == other.reward for best, other in zip(own, others[policy], strict=True)]
        if (policy == "empty" and any(equal)) or all([*equal, len(equal) > 3]):
            gets = f"get {own[0].reward:g}, as much as solution(row), in {sum(equal)} of {len(own)} rows"
            fix = "compare the answer itself, and reward what is none with less"
            raise Defect("empty", f"{policy} answers {gets}", fix)
    if place := _visible(own, others["copy"]):
        raise Defect("visible", f"the answer of each row {place}", "leave it out of what the model reads")


def _visible(own: list[Play], copied: list[Play]) -> str:
    """Return where the model can read the answer in every row; empty if nowhere. That it stands anywhere is no defect:
    many questions list the answers to choose from, or ask to find one in a text."""
    bare = [re.sub(r"<[^>]*>", "", str(POLICIES["oracle"](play))).strip() for play in own]
    if len(set(bare)) < 2:
        return ""
    if all(copy.reward == play.reward for play, copy in zip(own, copied, strict=True)):
        return "is what it reads: a copy gets the full reward"
    if all(re.search(rf"{_LABELLED}{re.escape(one)}(?!\w)", play.start) for play, one in zip(own, bare, strict=True)):
        return f"is named in what it reads: {shown(own[0].start[-60:])}"
    schemas = [json.dumps(play.tools, ensure_ascii=False, default=str) for play in own]
    found = [[bool(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", schema)) for one in bare] for schema in schemas]
    alone = found == [[one == mine for one in bare] for mine in bare]
    return "is in the schema of its tools, and no other row's is" if alone else ""


async def rewards(subject: Subject) -> None:
    """Check that every reward so far is a finite number, and an episode's in the environment's ``reward_range``."""
    low, high = getattr(subject.plays[0].environment, "reward_range", (-math.inf, math.inf))
    for play in subject.plays:
        for given in (step.reward for step in play.steps):
            for each in given.values() if isinstance(given, Mapping) else [given]:
                if not isinstance(each, Real) or not math.isfinite(each):
                    text = f"a step's reward is {each!r}, of type {type(each).__name__}"
                    raise Defect("rewards", text, "give a finite float, or a dict with one for each seat")
        if not low <= play.reward <= high:
            text = f"an episode's reward is {play.reward:g}, outside of {low:g} to {high:g}"
            raise Defect("range", text, "scale the rewards, or correct reward_range")


async def failed_programs(subject: Subject) -> None:
    """Replace the programs that judge an answer by one that fails: then nothing may be rewarded as a solution."""
    solved = [await subject.play("oracle")] if subject.has_solution else []
    programs: list[str] = []
    real = subprocess.Popen.__init__

    def start(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        programs.append(shown(args))
        real(self, ["false"], *rest, **options | {"shell": False, "executable": None})

    for answer in ("", "x", *(play.action for play in solved)):
        async with subject.episode() as play:
            with patch.object(subprocess.Popen, "__init__", start):
                await play.act(answer)
        if programs and play.reward > 0 and all(play.reward >= best.reward for best in solved):
            fix = "raise in step unless the verifier ended as it does after judging"
            raise Defect("verify", f"an answer gets {play.reward:g} where {programs[-1]} fails", fix)
    if not programs:
        raise Skipped("it starts no program to judge an answer")


async def reward_files(subject: Subject) -> None:
    """Let the tools write a file, and put a 1 into those beside or below it that are read while an answer is judged.
    The working directory is left alone, and what outlives the episode is put back."""
    tools = [(tool, names) for tool in subject.plays[0].tools if (names := _texts(tool))]
    if not tools:
        raise Skipped("it has no tool that takes text")
    real, own, read, changes = builtins.open, {Path.cwd(), *Path.cwd().parents}, dict[Path, bytes](), False

    def opening(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        path = Path(os.fsdecode(file)).absolute() if isinstance(file, str | os.PathLike) else Path("/")
        if "r" in mode and path.is_file() and any((folder / _CANARY).exists() for folder in set(path.parents) - own):
            with real(path, "rb") as before:
                read.setdefault(path, before.read())
            if changes:
                with real(path, "w") as changed:
                    changed.write("1")
        return real(file, mode, *rest, **options)

    def put_back() -> None:
        for path in filter(Path.exists, read):
            path.write_bytes(read[path])
        _CANARY.unlink(missing_ok=True)

    for tool, names in tools:
        given: list[float] = []
        for _ in range(2):
            changes = bool(given)
            async with subject.episode() as play:
                call = tool_call(tool, play.draw)
                for name in names:
                    command = "1" if _TEXT.search(name) else f"touch {_CANARY}"
                    call.arguments[name] = str(_CANARY) if _PATH.search(name) else command
                await play.act([call])
                with patch.object(builtins, "open", opening), patch.object(io, "open", opening):
                    await play.act("")
            given.append(play.reward)
            put_back()
        if read and given[1] > given[0]:
            text = f"{call.name} can write {next(iter(read)).name}, and a 1 in it gives an empty answer {given[1]:g}"
            raise Defect("reward file", text, "keep it where no tool can write, and judge after the tools have ended")


def _texts(tool: dict[str, Any]) -> list[str]:
    properties = tool["function"].get("parameters", {}).get("properties", {})
    return [name for name, each in properties.items() if each.get("type") == "string" and "enum" not in each]
