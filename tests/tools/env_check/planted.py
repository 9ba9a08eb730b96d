"""A sound environment, and one with each defect."""

from __future__ import annotations
import asyncio
import contextlib
import random
import shlex
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from areal_lite.environments import Observation, Step, ToolCall, WrongAction

UNSEEDED = random.SystemRandom()


class Sound:
    """Asks for a sum; a tool doubles numbers. An answer ends it, or 30 steps do."""

    max_number, waits = 50, True

    def __init__(self) -> None:
        self.steps, self.over = 0, False

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self.row, self.draw = row, random.Random(seed)
        return f"What is {row['number'] + 30} and {row['number'] + 41}? Reply with a number."

    def tools(self) -> list[dict[str, Any]]:
        return [schema("double", {"n": {"type": "integer"}, "unit": {"type": "string"}}, ["n"])]

    async def step(self, action: str | list[ToolCall]) -> Step:
        if self.over:
            raise RuntimeError("the episode is over")
        self.steps += 1
        if self.waits:
            await asyncio.sleep(0)
        step = self.judged(action) if isinstance(action, str) else Step([self.called(call) for call in action])
        cut = self.steps == 30 and not step.done
        step = Step(step.messages, step.reward, step.done, truncated=cut, info={"truncated": cut})
        self.over = step.done or step.truncated
        return step

    def called(self, call: ToolCall) -> dict[str, Any]:
        if call.name != "double":
            raise WrongAction(f"there is no tool {call.name}")
        return call.result(f"{2 * call.arguments['n']} in step {self.steps}, luck {self.draw.random()}")

    def judged(self, answer: str) -> Step:
        return Step(reward=float(answer == self.solution(self.row)), done=True)

    def solution(self, row: dict[str, Any]) -> str:
        return str(2 * row["number"] + 71)

    async def close(self) -> None:
        pass


def schema(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


class Choices(Sound):
    """Its text and the schema of its tool list what may be answered."""

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        return f"{await super().reset(row, seed)}\nIs it odd? Answer: yes or no."

    def tools(self) -> list[dict[str, Any]]:
        return [schema("double", {"n": {"type": "integer", "enum": [1, 2]}, "word": {"enum": ["yes", "no"]}}, ["n"])]

    def solution(self, row: dict[str, Any]) -> str:
        return "yes" if row["number"] % 2 else "no"


class AlwaysYes(Choices):
    """So few rows that all have the same answer, which the text lists."""

    def solution(self, row: dict[str, Any]) -> str:
        return "yes"


class AnyTool(Sound):
    """Answers calls of any tool alike."""

    def called(self, call: ToolCall) -> dict[str, Any]:
        return call.result("ok")


class TwoSeats:
    """Each seat names a number; the greater one wins."""

    players = 2

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self.said: list[str] = []
        return Observation("Name a number from 1 to 9.", player=1)

    async def step(self, action: str) -> Step:
        if not action.strip(".").isdigit():
            raise WrongAction("Name a number.")
        self.said.append(action)
        if len(self.said) == 1:
            return Step("Name another.", player=0)
        return Step(reward=self.won(max(self.said) == self.said[1]), done=True)

    def won(self, first: bool) -> dict[int, Any]:
        return {0: float(first), 1: float(not first)}

    async def close(self) -> None:
        pass


class SeatReward(TwoSeats):
    def won(self, first: bool) -> dict[int, Any]:
        return {0: 1.0, 1: "lost"}


class Refuses(Sound):
    def judged(self, answer: str) -> Step:
        raise WrongAction("Speak up.")

    def called(self, call: ToolCall) -> dict[str, Any]:
        raise WrongAction(f"{call.name} is closed on {call.arguments.get('n')}")


class UnseededStart(Sound):
    async def reset(self, row: dict[str, Any], seed: int) -> str:
        return f"{UNSEEDED.random()} {await super().reset(row, seed)}"


class UnseededStep(Sound):
    def called(self, call: ToolCall) -> dict[str, Any]:
        return super().called(call) | {"content": f"{UNSEEDED.random()}"}


class NoisyVerifier(Sound):
    def judged(self, answer: str) -> Step:
        return Step(reward=super().judged(answer).reward + UNSEEDED.random() / 10, done=True)  # type: ignore[operator]


class Level(Sound):
    """A level that rises with the episodes of all objects."""

    level: ClassVar[list[int]] = []

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        return f"Level {len(self.level)}. {await super().reset(row, seed)}"

    def judged(self, answer: str) -> Step:
        self.level.append(1)
        return super().judged(answer)


class Fatigue(Sound):
    """Rewards that fall with every answer of all objects."""

    answered = 0

    def judged(self, answer: str) -> Step:
        type(self).answered += 1
        return Step(reward=super().judged(answer).reward - 0.01 * self.answered, done=True)  # type: ignore[operator]


class OneGame(Sound):
    """One question for all episodes, that of the latest reset, in code that never waits."""

    waits = False

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        text = await super().reset(row, seed)
        OneGame.question = text  # type: ignore[attr-defined]
        return text

    def called(self, call: ToolCall) -> dict[str, Any]:
        return super().called(call) | {"content": OneGame.question}  # type: ignore[attr-defined]


class TextReward(Sound):
    def judged(self, answer: str) -> Step:
        return Step(reward="good" if answer == "?" else 0.0, done=True) if answer else Step(reward=None, done=True)  # type: ignore[arg-type]

    def __getattribute__(self, name: str) -> Any:
        if name == "solution":
            raise AttributeError(name)
        return super().__getattribute__(name)


class NotFinite(Sound):
    def judged(self, answer: str) -> Step:
        return super().judged(answer) if answer else Step(reward=float("-inf"), done=True)


class OutOfRange(Sound):
    reward_range = (0.0, 0.5)


class WrongSolution(Sound):
    def solution(self, row: dict[str, Any]) -> str:
        return "the sum"

    def judged(self, answer: str) -> Step:
        return Step(reward=float(answer == super().solution(self.row)), done=True)


class HalfSolution(Sound):
    def judged(self, answer: str) -> Step:
        return Step(reward=0.5 if answer == self.solution(self.row) else float(answer != ""), done=True)


class EmptyIsRight(Sound):
    def judged(self, answer: str) -> Step:
        return Step(reward=float(self.solution(self.row).startswith(answer)), done=True)


class AnythingIsRight(Sound):
    def judged(self, answer: str) -> Step:
        return Step(reward=float(answer != ""), done=True)

    def tools(self) -> list[dict[str, Any]]:
        return []


class AnswerInText(Sound):
    async def reset(self, row: dict[str, Any], seed: int) -> str:
        return f"{await super().reset(row, seed)} (solution: {self.solution(row)})"


class CopyIsRight(Sound):
    async def reset(self, row: dict[str, Any], seed: int) -> str:
        return f"{await super().reset(row, seed)} Choose from 70 71 {self.solution(row)}"

    def judged(self, answer: str) -> Step:
        return Step(reward=float(self.solution(self.row) in answer.split()), done=True)


class AnswerInSchema(Sound):
    def tools(self) -> list[dict[str, Any]]:
        about = {"type": "integer", "description": f"such as {self.solution(self.row)}"}
        return [schema("double", {"n": about}, ["n"])]


class RewardFile(Sound):
    """The verifier reads its judgement from a file beside those of the tool."""

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self.folder = tempfile.TemporaryDirectory()
        (Path(self.folder.name) / "reward.txt").write_text("0")
        return await super().reset(row, seed)

    def tools(self) -> list[dict[str, Any]]:
        return [schema("write", {"path": {"type": "string"}, "content": {"type": "string"}}, ["path", "content"])]

    def called(self, call: ToolCall) -> dict[str, Any]:
        if call.name != "write":
            raise WrongAction(f"there is no tool {call.name}")
        (Path(self.folder.name) / call.arguments["path"]).write_text(call.arguments["content"])
        return call.result("written")

    def judged(self, answer: str) -> Step:
        file = Path(self.folder.name) / "reward.txt"
        if answer == self.solution(self.row):
            file.write_text("1")
        return Step(reward=float(file.read_text()), done=True)

    async def close(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


class SharedRewardFile(RewardFile):
    """One folder for all episodes, which stays."""

    place: ClassVar[tuple[Path]]

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self.folder = SimpleNamespace(name=str(self.place[0]), cleanup=lambda: None)  # type: ignore[assignment]
        return await Sound.reset(self, row, seed)


class RewardFileByShell(RewardFile):
    def tools(self) -> list[dict[str, Any]]:
        return [schema("shell", {"command": {"type": "string"}}, ["command"])]

    async def step(self, action: str | list[ToolCall]) -> Step:
        if isinstance(action, list) and action[0].name == "shell" and not self.over:
            program = await asyncio.create_subprocess_shell(
                action[0].arguments["command"], cwd=self.folder.name, stderr=asyncio.subprocess.DEVNULL
            )
            return Step(f"exit code {await program.wait()}")
        return await super().step(action)


class Program(Sound):
    """A program judges, and a failure of it is one of the episode."""

    async def step(self, action: str | list[ToolCall]) -> Step:
        step = await super().step(action)
        if not isinstance(action, str):
            return step
        command = f"test {shlex.quote(action)} = {Sound.solution(self, self.row)} && echo passed || echo failed"
        program = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
        output, _ = await program.communicate()
        return Step(reward=self.reward_of(output, program.returncode), done=True)

    def reward_of(self, output: bytes, code: int | None) -> float:
        if code != 0:
            raise RuntimeError("the verifier failed")
        return float(output == b"passed\n")


class QuietProgram(Program):
    """Without a solution, and with no reward where its program fails."""

    @property
    def solution(self) -> Any:  # type: ignore[override]
        raise AttributeError

    def judged(self, answer: str) -> Step:
        return Step(done=True)

    def reward_of(self, output: bytes, code: int | None) -> float:
        return float(output == b"passed\n")


class FailedIsPassed(Program):
    def reward_of(self, output: bytes, code: int | None) -> float:
        return float(b"failed" not in output)


class NeverDone(Sound):
    async def step(self, action: str | list[ToolCall]) -> Step:
        self.steps = 0
        step = await super().step(action)
        self.over = False
        return Step(step.messages or "Go on.", step.reward)


class GoesOn(Sound):
    async def step(self, action: str | list[ToolCall]) -> Step:
        self.over = False
        return await super().step(action)

    def judged(self, answer: str) -> Step:
        self.ends = getattr(self, "ends", 0) + 1
        return Step(reward=super().judged(answer).reward, done=self.ends == 1)


class Sleeps(Sound):
    def called(self, call: ToolCall) -> dict[str, Any]:
        time.sleep(0.06)
        return super().called(call)


class Computes(Sound):
    def called(self, call: ToolCall) -> dict[str, Any]:
        began = time.thread_time()
        while time.thread_time() < began + 0.01:
            pass
        return super().called(call)


class LeavesTasks(Sound):
    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self.clock = asyncio.create_task(asyncio.sleep(3600))
        return await super().reset(row, seed)

    async def step(self, action: str | list[ToolCall]) -> Step:
        step = await super().step(action)
        if step.done or step.truncated:
            self.clock.cancel()
        return step


class LeavesThreads(Sound):
    stop: ClassVar[threading.Event] = threading.Event()

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        threading.Thread(target=self.stop.wait, daemon=True).start()
        return await super().reset(row, seed)


class LeavesFiles(Sound):
    opened: ClassVar[tuple[contextlib.ExitStack]] = (contextlib.ExitStack(),)

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self.opened[0].enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        return await super().reset(row, seed)


class MissingTool(Sound):
    def tools(self) -> list[dict[str, Any]]:
        return [*super().tools(), schema("halve", {"n": {"type": "integer"}}, ["n"])]


class NeedsMore(Sound):
    def called(self, call: ToolCall) -> dict[str, Any]:
        if call.name == "double" and "unit" not in call.arguments:
            raise WrongAction("double needs unit")
        return super().called(call)


class RequiresMissing(Sound):
    def tools(self) -> list[dict[str, Any]]:
        return [schema("double", {"n": {"type": "integer"}}, ["n", "unit"])]


class FailsOnCalls(Sound):
    def called(self, call: ToolCall) -> dict[str, Any]:
        super().called(call)
        raise KeyError("n")


class AnswersNoCall(Sound):
    def called(self, call: ToolCall) -> dict[str, Any]:
        return {"role": "user", "content": super().called(call)["content"]}


class LimitIsDone(Sound):
    def __init__(self, max_turns: int = 8) -> None:
        super().__init__()
        self.max_turns = max_turns

    async def step(self, action: str | list[ToolCall]) -> Step:
        if self.steps == self.max_turns:
            raise RuntimeError("the episode is over")
        if isinstance(action, str) and self.steps + 1 < self.max_turns:
            self.steps += 1
            return Step("Think longer.")
        step = await super().step(action)
        return Step(step.messages, step.reward, done=self.steps == self.max_turns)


class FactsOfLimit(Sound):
    async def step(self, action: str | list[ToolCall]) -> Step:
        step = await super().step(action)
        return Step(step.messages, step.reward, step.done or step.truncated, info={"TimeLimit.truncated": step.done})


class Raises(Sound):
    def judged(self, answer: str) -> Step:
        return Step(reward=float(int(answer or 0) == int(self.solution(self.row))), done=True)


class RaisesLater(Sound):
    def called(self, call: ToolCall) -> dict[str, Any]:
        if self.steps > 1:
            raise KeyError("the first call")
        return super().called(call)


class NoReset(Sound):
    async def reset(self, row: dict[str, Any], seed: int) -> str:
        raise OSError("no licence")


class CannotBeMade(Sound):
    def __init__(self) -> None:
        raise ImportError("no engine")


class FailsInClose(Sound):
    async def close(self) -> None:
        if self.steps:
            raise OSError("no disk")


class Letters:
    """Rewards lower-case letters, of which random weights write some."""

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        return "Write letters."

    async def step(self, action: str) -> Step:
        return Step(reward=float(sum(each.islower() for each in action)), done=True)

    async def close(self) -> None:
        pass


class NoLetters(Letters):
    async def step(self, action: str) -> Step:
        return Step(reward=0.25, done=True)
