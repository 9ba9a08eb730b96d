"""Each model call has the name of its agent: main, or a sub-agent with a system prompt of its own."""

from __future__ import annotations
import asyncio
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import anthropic
import openai
import pytest
from rich.console import Console
from areal_lite.agents.session.chat_request import parse_chat_request
from areal_lite.agents.session.chat_session import AgentNames
from areal_lite.api.trajectory import Trajectory, TurnRole
from areal_lite.cli.commands import parse
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.rollout import workflow_context
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.tools.inspect.terminal import inspect
from tests.agents.scripted_engine import tokenizer
from tests.stub_server import StubServer, StubThread


def system(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": text, **fields}


@pytest.mark.parametrize(
    ("prompts", "names"),
    [
        ([[system("You lead.")], [system("You add.")], [system("You lead.")]], ["main", "add.", "main"]),
        ([[], [system("You add numbers.")], []], ["main", "You add numbers.", "main"]),
        ([[system("You lead.")], []], ["main", "no system prompt"]),
        ([[system("Be brief. You lead.")], [system("Be brief.")]], ["main", "Be brief."]),
        (
            [[system("Lead")], [system("add one two three four five")], [system("add one two three four 5")]],
            ["main", "add one two three four five", "add one two three four 5"],
        ),
        (
            [[system("Lead")], [system("add one two three four five 6")], [system("add one two three four five 7")]],
            ["main", "add one two three four five", "add one two three four five 3"],
        ),
        ([[system("You lead."), {"role": "developer", "content": "A"}], [system("You lead.")]], ["main", "You lead."]),
        ([[system("x " * 9)], [system("w" * 5000)]], ["main", "w" * 60]),
        ([[system("You plan.", name="planner")], [system("You lead.")]], ["planner", "main"]),
    ],
)  # fmt: skip
def test_the_first_system_prompt_is_main_and_others_are_named_by_what_differs(prompts: Any, names: list[str]) -> None:
    agents = AgentNames()
    ask = {"role": "user", "content": "?"}
    assert [agents.name(parse_chat_request({"messages": [*prompt, ask]})) for prompt in prompts] == names


@pytest.mark.parametrize(("metadata", "name"), [
    ({"agent": "  the\n planner "}, "the planner"), ({"agent": ""}, "main"), ({"agent": 1}, "main"), ([], "main"),
    ({"user_id": "u"}, "main"), (None, "main"),
])  # fmt: skip
def test_a_request_may_name_its_agent(metadata: Any, name: str) -> None:
    messages = [system("You lead.", name=""), {"role": "user", "content": "?"}]
    assert AgentNames().name(parse_chat_request({"messages": messages, "metadata": metadata})) == name


class Team:
    """A main agent, and three sub-agents that run at once, each with two calls through another API."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        access = workflow_context.get().agent
        client = openai.AsyncOpenAI(**extra_kwargs)
        claude = anthropic.AsyncAnthropic(
            base_url=access.anthropic_base_url, api_key=access.api_key, http_client=extra_kwargs["http_client"]
        )

        async def chat(prompt: str, *, delegates: bool = False) -> None:
            messages: list[Any] = [system(prompt), {"role": "user", "content": "hello"}]
            answer = await client.chat.completions.create(model="m", messages=messages)
            if delegates:
                await subs()
            messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
            await client.chat.completions.create(model="m", messages=messages)

        async def messages(prompt: str) -> None:
            history: list[Any] = [{"role": "user", "content": "hello"}]
            answer = await claude.messages.create(model="m", max_tokens=9, system=prompt, messages=history)
            history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "again"}]
            await claude.messages.create(model="m", max_tokens=9, system=prompt, messages=history)

        async def responses(prompt: str) -> None:
            named: Any = {"model": "m", "metadata": {"agent": "painter"}}
            first = await client.responses.create(instructions=prompt, input="hello", **named)
            await client.responses.create(instructions=prompt, input="again", previous_response_id=first.id, **named)

        async def subs() -> None:
            await asyncio.gather(chat("You check sums."), messages("You add numbers."), responses("You draw."))

        if data["main_first"]:
            await chat("You lead.", delegates=True)
        else:
            await asyncio.gather(subs(), chat("You lead."))
        if data["fails"]:
            raise RuntimeError("after all calls")
        return 1.0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RemoteInfEngine]:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    with StubThread(StubServer(answer_len=3)) as stub:
        config = InferenceEngineConfig(
            backend="sglang", addresses=[stub.address], tokenizer_path=str(tmp_path / "tokenizer"),
            fileroot=str(tmp_path), dump_to_file=True, gconfig=GenerationHyperparameters(max_new_tokens=8),
        )  # fmt: skip
        with RemoteInfEngine(config) as engine:
            yield engine


def agents_of(trajectory: Trajectory) -> dict[str | None, int]:
    return Counter(turn.agent for turn in trajectory.turns if turn.role is TurnRole.ASSISTANT)


def test_sub_agents_of_every_api_are_named_in_trajectory_dump_and_inspect(
    engine: RemoteInfEngine, tmp_path: Path
) -> None:
    (group,) = engine.rollout_batch([{"main_first": True, "fails": False}], Team())
    (trajectory,) = group.trajectories
    names = {"main": 2, "check sums.": 2, "add numbers.": 2, "painter": 2}
    assert agents_of(trajectory) == names, group.error
    branches = [{trajectory.turns[place].agent for place in s.path} - {None} for s in trajectory.sequences]
    assert sorted(branches, key=str) == sorted(({name} for name in names), key=str)
    engine.destroy()

    (path,) = tmp_path.rglob("rollout/*/*.jsonl")
    turns = [turn for line in path.read_text().splitlines() for turn in json.loads(line)["turns"]]
    assert Counter(turn["agent"] for turn in turns if turn["role"] == "assistant") == names
    console = Console(file=io.StringIO(), width=200)
    inspect(parse(["inspect", str(path), "--by", "turns", "--limit", "9"]), console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("assistant painter (3 tokens") == text.count("assistant main (3 tokens") == 2


def test_an_episode_that_failed_keeps_the_names(engine: RemoteInfEngine) -> None:
    (group,) = engine.rollout_batch([{"main_first": False, "fails": True}], Team())
    (trajectory,) = group.trajectories
    assert group.status == "failed" and "after all calls" in str(group.error)
    assert sum(agents_of(trajectory).values()) == 8 and agents_of(trajectory)["painter"] == 2
