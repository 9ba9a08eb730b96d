"""Long prompts and long conversations leave the event loop to other episodes."""

from __future__ import annotations
import asyncio
import os
from typing import Any
import orjson
import pytest
from areal_lite.agents.doors import completions
from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.doors.completions import ChatCompletions
from areal_lite.agents.session import chat_request
from areal_lite.agents.session.chat_renderer import ChatRenderer, _tokenizers
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.config.generation import GenerationHyperparameters
from tests.agents.scripted_engine import ScriptedEngine, create, tokenizer


def test_other_tasks_run_while_a_prompt_of_two_megabytes_is_tokenized() -> None:
    renderer = ChatRenderer(tokenizer())
    text = "hello there, how are you today? <|im_end|> I am well. 12 ümläuts\n" * 32_000

    async def play() -> int:
        turns = 0
        tokenizing = asyncio.create_task(renderer.plain(text, begins=False))
        while not tokenizing.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert tokenizing.result()[:1000] == renderer.tokenizer.encode(text[:10_000])[:1000]
        assert renderer.decode(tokenizing.result()) == text
        return turns

    assert asyncio.run(play()) > 50  # 3 if the tokenizer holds the GIL


def test_a_fork_tokenizes_in_threads_of_its_own() -> None:
    assert _tokenizers().submit(int).result(10) == 0
    if (child := os.fork()) == 0:
        try:
            os._exit(_tokenizers().submit(int).result(10))
        finally:  # its thread never came
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("characters", "together"), [(100_000, 1), (100, 6)])
def test_large_requests_go_on_one_at_a_time(monkeypatch: pytest.MonkeyPatch, characters: int, together: int) -> None:
    read: list[int] = []
    answered: list[int] = []
    passes = 0
    load = completions.json_object

    def note(body: bytes) -> Any:
        read.append(passes)
        return load(body)

    monkeypatch.setattr(completions, "json_object", note)
    service = AgentService()

    async def ask() -> None:
        engine = ScriptedEngine(lambda request: "short")
        session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters(max_tokens=10**6))  # type: ignore[arg-type]
        headers = {"authorization": f"Bearer {service.open(session)}"}
        body = orjson.dumps({"messages": [{"role": "user", "content": "a" * characters}]})
        reply = await service.handle("POST", "/v1/chat/completions", headers, body)
        assert reply.status == 200
        answered.append(passes)

    async def play() -> None:
        nonlocal passes
        asking = asyncio.gather(*(ask() for _ in range(6)))
        while not asking.done():
            await asyncio.sleep(0)
            passes += 1

    asyncio.run(play())
    for each in (read, answered):
        assert max(each.count(number) for number in each) == together


@pytest.mark.parametrize("begins_alike", [True, False])
def test_a_turn_parses_only_its_new_messages_also_among_other_conversations(
    monkeypatch: pytest.MonkeyPatch, begins_alike: bool
) -> None:
    parsed = json_bytes = 0
    parse, load = chat_request.parse_message, completions.json_object

    def count_bytes(body: bytes) -> Any:
        nonlocal json_bytes
        json_bytes = len(body)
        return load(body)

    monkeypatch.setattr(completions, "json_object", count_bytes)

    def count(raw: Any, where: str) -> Any:
        nonlocal parsed
        parsed += 1
        return parse(raw, where)

    monkeypatch.setattr(chat_request, "parse_message", count)
    engine = ScriptedEngine(lambda request: f"answer {len(request.input_ids)}")
    session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters(max_tokens=10**6))  # type: ignore[arg-type]

    async def play() -> None:
        agents: list[list[Any]] = [[{"role": "system", "content": f"agent {name}"}] for name in range(3)]
        for turn in range(60):
            for messages in agents:
                messages.append({"role": "user", "content": f"question {turn}"})
                before = parsed
                completion = await create(session, {"seed": 0 if begins_alike else turn, "messages": messages})
                assert parsed - before == 2  # the answer and the question, or the system message
                assert json_bytes < 200 or not begins_alike
                messages.append(completion["choices"][0]["message"])
        # An edited history is read from its beginning.
        agents[0][1]["content"] = "another question"
        agents[0].append({"role": "user", "content": "and now?"})
        before = parsed
        await create(session, {"messages": agents[0]})
        assert parsed - before == len(agents[0])

    asyncio.run(play())
    assert session.forks == 1
    assert len(session.history.export("concat")) == 4


def test_the_turns_of_a_conversation_share_one_list_of_ids() -> None:
    engine = ScriptedEngine(lambda request: f"answer {len(request.input_ids)}")
    session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters(max_tokens=10**6))  # type: ignore[arg-type]

    async def play() -> None:
        messages: list[Any] = []
        for turn in range(20):
            messages.append({"role": "user", "content": f"question {turn}"})
            await session.count_tokens(ChatCompletions(orjson.dumps({"messages": messages}), session).request)
            completion = await create(session, {"messages": messages})
            if turn == 10:  # another answer to the same prompt, which is not continued
                await create(session, {"messages": messages})
            messages.append(completion["choices"][0]["message"])

    asyncio.run(play())
    responses = [answer.model_response for answer in session.interactions.values()]
    assert [response.input_tokens for response in responses] == [request.input_ids for request in engine.requests]
    assert len({id(response.prompt.ids) for response in responses}) == 1
    assert len(responses[-1].prompt.ids) == responses[-1].input_len
