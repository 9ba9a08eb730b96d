"""Tasksets of verifiers, in the interpreter that a variable names, with the programs that verifiers itself starts."""

from __future__ import annotations
import asyncio
import os
from pathlib import Path
from typing import Any
import pytest
from areal_lite.environments import Step, ToolCall
from areal_lite.environments.catalog import rows
from areal_lite.environments.environment_agent import EnvironmentAgent
from areal_lite.environments.random_state import OwnRandom

PYTHON = os.environ.get("AREAL_LITE_VERIFIERS_PYTHON", "")
pytestmark = [
    pytest.mark.environments,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON, reason="AREAL_LITE_VERIFIERS_PYTHON names no Python that has verifiers and uv"),
]

SUMS = '''
import itertools
import verifiers.v1 as vf

class Sum(vf.TaskData):
    answer: str

class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two whole numbers."""
        return str(a + b)

class SumTask(vf.Task[Sum]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer) if trace.last_reply != "raise" else 1 / 0

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())] if __name__ == "with_tools" else []

class Sums(vf.Taskset[SumTask]):
    INFINITE = __name__ == "endless"

    def load(self):
        for n in itertools.count() if self.INFINITE else range(20):
            yield SumTask(Sum(prompt=f"{n} + {n}?", answer=str(2 * n)), self.config.task)

__all__ = ["Sums"]
if __name__ == "__main__":
    Calculator.run()
'''


@pytest.fixture(autouse=True)
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sums", "with_tools", "endless"):
        (tmp_path / f"{name}.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def play(taskset: str, number: int, *actions: Any, **kwargs: Any) -> list[Any]:
    options: Any = {"isolation": f"python:{PYTHON}", "processes": 2, "timeout_s": 200.0}
    agent = EnvironmentAgent(f"verifiers:{taskset}", kwargs=kwargs, **options)
    environment = await agent._made(OwnRandom(3), 3, agent.env)
    try:
        first = await environment.reset({"number": number}, 3)
        return [first, *[await environment.step(action) for action in actions], getattr(environment, "tools", list)()]
    finally:
        await environment.close()


def test_rows_are_numbers_without_a_look_at_verifiers() -> None:
    assert rows("verifiers:sums", {"size": 2, "seed": 5}) == [
        {"env": "verifiers:sums", "number": number} for number in (5, 6)
    ]


def test_a_question_is_asked_and_the_answer_judged() -> None:
    async def go() -> Any:
        return await asyncio.gather(play("sums", 3, "6"), play("sums", 1_000_000, "0"))

    (first, right, _), (held_out, wrong, _) = asyncio.run(go())
    assert [each["content"] for each in (*first.messages, *held_out.messages)] == ["3 + 3?", "19 + 19?"]
    assert right == Step(reward=2.0, done=True, info={"correct": 2.0, "length": 1.0})
    assert (wrong.reward, wrong.done, wrong.info["correct"]) == (0.0, True, 0.0)


def test_tools_are_called_until_a_text_ends_the_task() -> None:
    async def go() -> Any:
        calls = [ToolCall("a", "calculator_add", {"a": 4, "b": 4}), ToolCall("b", "calculator_add", {"a": "x"})]
        return await play("with_tools", 4, calls, "8")

    _, called, end, tools = asyncio.run(go())
    assert [tool["function"]["name"] for tool in tools] == ["calculator_add"]
    assert [(each["role"], each["tool_call_id"]) for each in called.messages] == [("tool", "a"), ("tool", "b")]
    assert called.messages[0]["content"] == "8" and "valid integer" in called.messages[1]["content"]
    assert not called.done and (end.reward, end.done) == (2.0, True)


def test_a_limit_of_turns_is_no_end_of_the_task() -> None:
    call = [ToolCall("a", "calculator_add", {"a": 4, "b": 4})]
    *_, end, _ = asyncio.run(play("with_tools", 4, call, agent={"max_turns": 1}))
    assert (end.done, end.truncated) == (False, True)


@pytest.mark.timeout(60)  # an episode that is left without an answer ends at once
def test_an_endless_taskset_gives_its_even_tasks_to_train_and_its_odd_ones_to_evaluate() -> None:
    for number, asked in ((2, "4 + 4?"), (1_000_002, "5 + 5?")):
        assert asyncio.run(play("endless", number))[0].messages[0]["content"] == asked


def test_what_verifiers_cannot_judge_is_an_error_and_not_a_reward() -> None:
    with pytest.raises(Exception, match="division by zero"):
        asyncio.run(play("sums", 3, "raise"))
