"""Every API of agents with its real SDK, through both doors, streamed and whole: equal texts, tokens recorded once."""

from __future__ import annotations
import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
import anthropic
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.agents.doors.agent_service import MAX_BODY_BYTES, AgentService
from areal_lite.agents.doors.listener import Listener
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.agents.parsers.answer_parser import TextRegions
from areal_lite.agents.session.chat_answer import Piece, TextStream
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_request import parse_chat_request
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.api import episode_context
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.errors import ServerError
from tests.agents.scripted_engine import ScriptedEngine, tokenizer

Play = Callable[[AgentAccess, ChatSession, ScriptedEngine], Awaitable[None]]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CLIENTS: list[Any] = []
"""Closed at the end of each test, so that what is left open is ours."""
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")
DOORS = pytest.mark.parametrize("door", ["transport", "listener"])


async def close(doors: Listener) -> None:
    while CLIENTS:
        await CLIENTS.pop().close()
    await doors.close()


@asynccontextmanager
async def opened(answers: Any, **kwargs: Any) -> AsyncIterator[tuple[AgentAccess, ChatSession, ScriptedEngine]]:
    doors = await Listener(AgentService()).open()
    engine = ScriptedEngine(answers)
    session = ChatSession(
        engine,  # type: ignore[arg-type]
        ChatRenderer(engine.tokenizer),
        GenerationHyperparameters(),
        agent_samples=True,
        **kwargs,
    )
    try:
        yield doors.access(doors.service.open(session)), session, engine
    finally:
        await close(doors)


def play(answers: Any, steps: Play) -> None:
    async def run() -> None:
        async with opened(answers) as (access, session, engine):
            await steps(access, session, engine)

    asyncio.run(run())


def openai_client(access: AgentAccess, door: str) -> openai.AsyncOpenAI:
    client = access.http_client if door == "transport" else None
    CLIENTS.append(openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, http_client=client))
    return CLIENTS[-1]


def anthropic_client(access: AgentAccess, door: str) -> anthropic.AsyncAnthropic:
    client = access.http_client if door == "transport" else None
    CLIENTS.append(
        anthropic.AsyncAnthropic(base_url=access.anthropic_base_url, api_key=access.api_key, http_client=client)
    )
    return CLIENTS[-1]


def one_sequence(session: ChatSession, engine: ScriptedEngine) -> None:
    """All answers are one conversation, each sampled token trained once."""
    sequences = session.history.export("concat")
    assert len(sequences) == 1 and session.forks == 0
    (leaf,) = sequences.values()
    assert sum(node.model_response.output_len for node in leaf.trained_chain()) == sum(
        response.output_len for response in engine.responses
    )


@DOORS
def test_chat_completions_stream_what_they_would_answer_whole(door: str) -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, door)
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        for text in ("an answer with ümläuts 🙂 and  spaces", "a second one\n\nof lines"):
            stream = await client.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert content == text and len(chunks) > 5
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == engine.responses[-1].output_len
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert {chunk.id for chunk in chunks} == {list(session.interactions)[-1]}
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
        tools: Any = [CHAT_TOOL]
        stream = await client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(delta.content or "" for delta in deltas) == "Let me see."
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
        assert call.function is not None and json.loads(call.function.arguments or "") == {
            "a": 1,
            "b": [2, "ü"],
        }

    play(["an answer with ümläuts 🙂 and  spaces", "a second one\n\nof lines", f"Let me see.\n{CALL}"], steps)


@DOORS
def test_responses_continue_by_id_and_by_items(door: str) -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, door)
        tool: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
        first = await client.responses.create(model="m", input="hello", tools=[tool])
        (call,) = first.output
        assert call.type == "function_call" and json.loads(call.arguments) == {"a": 1, "b": [2, "ü"]}
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        second = await client.responses.create(model="m", input=[output], tools=[tool], previous_response_id=first.id)
        assert second.output_text == "It is 3." and second.status == "completed"
        items: list[Any] = [
            {"role": "user", "content": "hello"},
            call.model_dump(exclude_none=True),
            output,
            *[item.model_dump(exclude_none=True) for item in second.output],
            {"role": "user", "content": [{"type": "input_text", "text": "and now?"}]},
        ]
        async with client.responses.stream(model="m", input=items, tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
            third = await stream.get_final_response()
        assert third.output_text == "Now I am done." and third.usage is not None
        assert third.usage.output_tokens == engine.responses[-1].output_len
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert kinds.count("response.output_text.delta") > 1
        one_sequence(session, engine)
        with pytest.raises(openai.NotFoundError, match="no such response"):
            await client.responses.create(model="m", input="x", previous_response_id="resp_other")

    play([CALL, "It is 3.", "Now I am done."], steps)


@DOORS
def test_responses_of_the_own_session_can_be_read_and_deleted(door: str) -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, door)
        tool: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
        first = await client.responses.create(model="m", input="hello", tools=[tool])
        output: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "3"}  # type: ignore[union-attr]
        asked: Any = {"model": "m", "input": [output], "tools": [tool], "previous_response_id": first.id}
        async with client.responses.stream(**asked) as stream:
            second = await stream.get_final_response()
        assert await client.responses.retrieve(first.id) == first
        assert (await client.responses.retrieve(second.id)).output_text == "It is 3."
        items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
        kinds = [item.type for item in items]
        assert kinds == ["message", "function_call", "function_call_output"]
        newest = [item async for item in client.responses.input_items.list(second.id)]
        assert newest == items[::-1] and len({item.id for item in items}) == 3
        assert items[0].content[0].text == "hello" and items[1].call_id == items[2].call_id  # type: ignore[union-attr]
        assert json.loads(items[1].arguments) == {"a": 1, "b": [2, "ü"]}  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="not streamed"):
            await client.responses.retrieve(first.id, stream=True)
        await client.responses.delete(first.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="this episode has no such response"):
                await call(first.id)
        with pytest.raises(openai.NotFoundError, match="this episode has no such response"):
            await client.responses.create(**asked)
        with pytest.raises(openai.APIStatusError, match="use GET"):
            await client.post(f"/responses/{second.id}", cast_to=object)
        one_sequence(session, engine)  # what was sampled still trains
        other = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters())  # type: ignore[arg-type]
        key = access.http_client._transport._service.open(other)
        with pytest.raises(openai.NotFoundError, match="this episode has no such response"):
            await client.with_options(api_key=key).responses.retrieve(second.id)

    play([CALL, "It is 3."], steps)


def test_a_streamed_function_call_of_responses_is_complete() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, "transport")
        tool: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
        async with client.responses.stream(model="m", input="hello", tools=[tool]) as stream:
            final = await stream.get_final_response()
        text, call = final.output
        assert text.type == "message" and final.output_text == "Wait."
        assert call.type == "function_call" and json.loads(call.arguments)["b"] == [2, "ü"]

    play([f"Wait.\n{CALL}"], steps)


def test_functions_of_a_namespace_are_called_and_answered_by_both_names() -> None:
    """As Codex declares its tools for sub-agents; the model sees one name."""

    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, "transport")
        inside = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS}
        tools: Any = [{"type": "namespace", "name": "math", "tools": [inside]}]
        asked: list[Any] = [{"role": "user", "content": "add"}]
        first = await client.responses.create(model="m", input=asked, tools=tools)
        (call,) = first.output
        assert (call.type, call.name, call.model_dump()["namespace"]) == ("function_call", "add", "math")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        again = [*asked, call.model_dump(exclude_none=True), result]
        await client.responses.create(model="m", input=again, tools=tools)
        assert "math::add" in engine.tokenizer.decode(engine.requests[0].input_ids)
        one_sequence(session, engine)
        with pytest.raises(openai.BadRequestError, match="tools that OpenAI runs are not served"):
            hosted: Any = [{"type": "namespace", "name": "math", "tools": [{"type": "web_search"}]}]
            await client.responses.create(model="m", input=asked, tools=hosted)

    play([CALL.replace('"add"', '"math::add"'), "It is 3."], steps)


@DOORS
def test_messages_with_tools_streamed_and_whole(door: str) -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = anthropic_client(access, door)
        tools: Any = [{"name": "add", "description": "adds", "input_schema": PARAMETERS}]
        common: Any = {"model": "m", "max_tokens": 64, "system": "be kind", "tools": tools}
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        counted = await client.messages.count_tokens(model="m", messages=messages, system="be kind", tools=tools)
        first = await client.messages.create(messages=messages, **common)
        assert counted.input_tokens == first.usage.input_tokens == len(engine.requests[0].input_ids)
        text, call = first.content
        assert (text.type, call.type, first.stop_reason) == ("text", "tool_use", "tool_use")
        assert call.input == {"a": 1, "b": [2, "ü"]}  # type: ignore[union-attr]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}  # type: ignore[union-attr]
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        async with client.messages.stream(messages=messages, **common) as stream:
            pieces = [piece async for piece in stream.text_stream]
            second = await stream.get_final_message()
        assert "".join(pieces) == "It is 3, I think." and len(pieces) > 2
        assert second.usage.output_tokens == engine.responses[-1].output_len
        assert second.stop_reason == "end_turn"
        messages += [
            {"role": "assistant", "content": "It is 3, I think."},
            {"role": "user", "content": "again"},
        ]
        async with client.messages.stream(messages=messages, **common) as stream:
            third = await stream.get_final_message()
        assert [block.type for block in third.content] == ["text", "tool_use"]
        assert third.content[1].input == {"a": 1, "b": [2, "ü"]}  # type: ignore[union-attr]
        one_sequence(session, engine)
        cut = await client.messages.create(messages=messages, **{**common, "stop_sequences": [" fine"]})
        assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == (
            "stop_sequence",
            " fine",
            "all is",
        )  # type: ignore[union-attr]
        with pytest.raises(anthropic.BadRequestError, match="only text is supported"):
            image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
            await client.messages.create(messages=[{"role": "user", "content": [image]}], **common)

    play([f"Hm.\n{CALL}", "It is 3, I think.", f"Hm.\n{CALL}", "all is fine or not"], steps)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_input_of_300_levels_is_given_and_taken_by_messages(stream: bool) -> None:
    nested = '{"x": ' + "[" * 300 + "]" * 300 + "}"
    tool: Any = {"name": "add", "input_schema": PARAMETERS}
    question: Any = {"role": "user", "content": "?"}

    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = anthropic_client(access, "listener")
        asked: dict[str, Any] = {"model": "m", "max_tokens": 4096, "tools": [tool], "messages": [question]}
        if stream:  # event by event: the SDK's own joining stops at 200 levels
            events = [event async for event in await client.messages.create(**asked, stream=True)]
            (block,) = (event.content_block for event in events if event.type == "content_block_start")
            (text,) = (event.delta.partial_json for event in events if event.type == "content_block_delta")
            given = json.loads(text)
        else:
            (block,) = (await client.messages.create(**asked)).content
            given = block.input
        assert given == json.loads(nested)
        answer = {"role": "assistant", "content": [{"type": "tool_use", "id": block.id, "name": "add", "input": given}]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "4"}]}
        reply = await client.messages.create(**{**asked, "messages": [question, answer, result]})
        assert isinstance(reply.content[0], anthropic.types.TextBlock) and reply.content[0].text == "done"
        one_sequence(session, engine)

    play([f'<tool_call>\n{{"name": "add", "arguments": {nested}}}\n</tool_call>', "done"], steps)


@pytest.mark.parametrize(("levels", "status"), [(500, 200), (1000, 400), (2000, 400)])
def test_nesting_beyond_the_limit_is_a_bad_request(levels: int, status: int) -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        deep = "[" * levels + "]" * levels
        history = '{"messages": [{"role": "user", "content": "?"}, %s, {"role": "user", "content": "!"}], %s}'
        use = '{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"x": %s}}]}'
        call = '{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", %s}}]}'
        for path, body in (
            ("messages", history % (use % deep, '"max_tokens": 9')),
            ("chat/completions", history % (call % f'"arguments": {{"x": {deep}}}', '"n": 1')),
        ):
            reply = await access.http_client.post(f"{access.base_url}/{path}", content=body, headers=headers(access))
            assert (reply.status_code, "nested too deeply" in reply.text) == (status, levels == 1000), reply.text[:300]
        for name in ("temperature", "model", "stop", "tools", "max_tokens", "metadata", "messages"):
            body = f'{{"messages": [{{"role": "user", "content": "?"}}], "{name}": {deep}}}'
            reply = await access.http_client.post(
                f"{access.base_url}/chat/completions", content=body, headers=headers(access)
            )
            assert reply.status_code == 400 or name == "metadata", (name, reply.text[:300])

    def headers(access: AgentAccess) -> dict[str, str]:
        return {"content-type": "application/json", "authorization": f"Bearer {access.api_key}"}

    play(["ok"] * 20, steps)


def test_completions_of_text_and_of_ids_continue_what_was_sampled() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, "transport")
        first = await client.completions.create(model="m", prompt="once upon", logprobs=2, max_tokens=5)
        choice = first.choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == engine.responses[0].output_logprobs
        await client.completions.create(model="m", prompt="once upon" + choice.text + " and so on", max_tokens=5)
        recorded = engine.responses[0].input_tokens + engine.responses[0].output_tokens
        assert engine.requests[1].input_ids[: len(recorded)] == recorded
        ids = engine.responses[1].input_tokens + engine.responses[1].output_tokens
        stream = await client.completions.create(model="m", prompt=[*ids, 7], stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "the end"
        assert engine.requests[2].input_ids == [*ids, 7]
        one_sequence(session, engine)

    words = tokenizer().encode("all numbers are large", add_special_tokens=False)
    play([words, words, "the end"], steps)


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_choices_of_several_prompts_are_prompt_major_and_each_is_recorded_exactly(kind: str) -> None:
    encode = partial(tokenizer().encode, add_special_tokens=False)
    texts = ["once upon", "all numbers are large", "hello"]
    prompts: Any = texts if kind == "text" else [encode(text) for text in texts]

    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, "transport")
        completion = await client.completions.create(model="m", prompt=prompts, n=2, logprobs=1, seed=5)
        asked = [encode(text) for text in texts for _ in range(2)]
        assert [request.input_ids for request in engine.requests] == asked
        assert [request.gconfig.seed for request in engine.requests] == [5, 6] * 3
        names = list("abcdef")
        assert [(choice.index, choice.text) for choice in completion.choices] == list(enumerate(names))
        for choice, response in zip(completion.choices, engine.responses, strict=True):
            assert choice.logprobs is not None and choice.logprobs.token_logprobs == response.output_logprobs
        recorded = [answer.model_response for answer in session.interactions.values()]
        assert [answer.input_tokens for answer in recorded] == asked
        assert [answer.output_tokens for answer in recorded] == [answer.output_tokens for answer in engine.responses]
        assert completion.usage is not None and completion.usage.prompt_tokens == sum(map(len, asked[::2]))
        texts_of = ["", "", ""]
        stream = await client.completions.create(model="m", prompt=prompts, stream=True)
        async for chunk in stream:
            texts_of[chunk.choices[0].index] += chunk.choices[0].text
        assert texts_of == ["g", "h", "i"]
        for wrong in ([], ["a", [1]], [[1], []], ["a", ""], [[1, "a"]], ["a"] * 129):
            with pytest.raises(openai.BadRequestError, match="prompt"):
                await client.completions.create(model="m", prompt=wrong)  # type: ignore[call-overload]

    play(list("abcdefghi"), steps)


def test_choices_are_branches_of_the_conversation() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, "transport")
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        completion = await client.chat.completions.create(model="m", messages=messages, n=3)
        texts = [choice.message.content for choice in completion.choices]
        assert sorted(map(str, texts)) == ["one", "three", "two"]
        assert list(session.interactions) == [completion.id, f"{completion.id}-1", f"{completion.id}-2"]
        await client.chat.completions.create(
            model="m", messages=[*messages, completion.choices[1].message, {"role": "user", "content": "go"}]
        )
        assert len(session.history.export("concat")) == 3 and session.forks == 0
        stream = await client.chat.completions.create(model="m", messages=messages, n=2, stream=True)
        streamed = ["", ""]
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert sorted(streamed) == ["five", "six"]

    play(["one", "two", "three", "four", "five", "six"], steps)


def test_constraints_and_wishes_reach_the_engine() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, "transport")
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
        await client.chat.completions.create(
            model="m",
            messages=messages,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        )
        assert json.loads(engine.requests[-1].gconfig.json_schema or "") == schema
        await client.chat.completions.create(
            model="m", messages=messages, extra_body={"guided_choice": ["a.b", "c"]}, logit_bias={"7": -100}
        )
        assert engine.requests[-1].gconfig.regex == r"a\.b|c"
        assert engine.requests[-1].gconfig.logit_bias == {7: -100}
        forced: Any = {"type": "function", "function": {"name": "add"}}
        tools: Any = [CHAT_TOOL]
        completion = await client.chat.completions.create(
            model="m", messages=messages, tools=tools, tool_choice=forced, stream=False
        )
        required = json.loads(engine.requests[-1].gconfig.json_schema or "")
        assert required["properties"] == {"name": {"const": "add"}, "arguments": PARAMETERS}
        assert completion.choices[0].message.tool_calls is not None
        completion = await client.chat.completions.create(model="m", messages=messages, logprobs=True, top_logprobs=3)
        assert engine.requests[-1].top_logprobs == 3

    play(["{}", "c", '{"name": "add", "arguments": {"a": 1}}', "fine"], steps)


NUMBER = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}
NUMBER_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}


def grammar_of(**fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": NUMBER_FORMAT, **fields}
    return json.loads(parse_chat_request(body).grammar["json_schema"])


def test_with_tools_and_a_format_the_model_may_call_or_answer() -> None:
    call = {
        "type": "object",
        "properties": {"name": {"const": "add"}, "arguments": PARAMETERS},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    body = {name: value for name, value in NUMBER.items() if name != "$defs"}
    either = {"anyOf": [call, body], "$defs": NUMBER["$defs"]}
    assert grammar_of(tools=[CHAT_TOOL]) == grammar_of(tools=[CHAT_TOOL], tool_choice="auto") == either
    assert grammar_of(tools=[CHAT_TOOL], tool_choice="none") == grammar_of() == NUMBER
    assert grammar_of(tools=[CHAT_TOOL], tool_choice="required") == call
    parameters = {**PARAMETERS, "$defs": {"X": {"type": "string"}}}
    other = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    with pytest.raises(RequestError, match="rename one"):
        grammar_of(tools=[other])


def test_definitions_of_either_name_and_no_other_references_go_into_a_call() -> None:
    old = {
        "type": "object",
        "properties": {"x": {"$ref": "#/definitions/X"}},
        "definitions": {"X": {"type": "integer"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": old}}
    forced = grammar_of(tools=[tool], tool_choice="required")
    assert forced["definitions"] == old["definitions"] and "definitions" not in forced["properties"]["arguments"]
    assert grammar_of(tools=[tool])["definitions"] == old["definitions"]
    assert grammar_of(tools=[tool])["$defs"] == NUMBER["$defs"]
    recursive = {"type": "object", "properties": {"next": {"$ref": "#"}, "same": {"$ref": "#/properties/next"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": recursive}}
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": recursive}}
    assert grammar_of(response_format=format) == recursive
    for fields in ({"tools": [tool], "tool_choice": "required"}, {"tools": [CHAT_TOOL], "response_format": format}):
        with pytest.raises(RequestError, match=r"refers to a part of itself: move that part into its \$defs"):
            grammar_of(**fields)


def test_calls_with_arguments_that_are_no_object_stay_in_the_history() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, "transport")
        common: Any = {"model": "m", "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}]}
        first = await client.responses.create(input="hello", **common)
        output: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "3"}  # type: ignore[union-attr]
        second = await client.responses.create(input=[output], previous_response_id=first.id, **common)
        third = await client.responses.create(input="so?", previous_response_id=second.id, **common)
        assert third.output_text == "Done."
        one_sequence(session, engine)
        alone = await client.responses.create(input=[], instructions="x", model="m")
        assert (await client.responses.input_items.list(alone.id)).data == []

    for arguments in ("[1, 2]", "7", "true"):
        call = CALL.replace('{"a": 1, "b": [2, "ü"]}', arguments)
        play([call, "It is 3.", "Done.", "alone"], steps)


def test_an_agent_can_delete_the_variables_that_it_was_given() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        os.environ["AREAL_LITE_MINE"] = "1"
        with access.given():
            assert os.environ.pop("OPENAI_API_KEY", None) == access.api_key
            assert "OPENAI_API_KEY" not in os.environ and os.environ.pop("OPENAI_API_KEY", None) is None
            del os.environ["AREAL_LITE_MINE"]
            assert os.environ["OPENAI_BASE_URL"] == access.base_url
        assert "AREAL_LITE_MINE" not in os.environ

    play([], steps)


def test_what_only_chats_have_is_refused_for_a_prompt() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = openai_client(access, "transport")
        for field in ({"messages": [1]}, {"tools": [CHAT_TOOL]}, {"continue_final_message": True}):
            with pytest.raises(openai.BadRequestError, match=f"{next(iter(field))} is not served here: use /v1/chat"):
                await client.completions.create(model="m", prompt="x", extra_body=field)

    play([], steps)


def test_messages_constrain_an_answer_by_its_format() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = anthropic_client(access, "transport")
        common: Any = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
        output_format = {"type": "json_schema", "schema": NUMBER}
        await client.messages.create(**common, output_config={"format": output_format, "effort": "low"})
        assert json.loads(engine.requests[-1].gconfig.json_schema or "") == NUMBER
        with pytest.raises(anthropic.BadRequestError, match="send type text, json_object, or json_schema"):
            await client.messages.create(**common, output_config={"format": {"type": "xml"}})

    play(['{"x": 1}'], steps)


def test_errors_before_the_first_token_have_a_status_and_later_ones_an_event() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        headers = {"Authorization": f"Bearer {access.api_key}"}
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with httpx2.AsyncClient(headers=headers) as client:
            reply = await client.post(f"{access.base_url}/chat/completions", json=body)
            assert reply.status_code == 503 and "no server is left" in reply.json()["error"]["message"]
            key = {"x-api-key": access.api_key}
            reply = await client.post(f"{access.anthropic_base_url}/v1/messages", json={"bad": 1}, headers=key)
            assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
        async with httpx2.AsyncClient() as client:
            by_path = f"{access.anthropic_base_url}/s/{access.api_key}/v1/models"
            assert (await client.get(by_path)).json()["data"][0]["id"] == "default"

    play([ServerError("no server is left")], steps)


def test_the_listener_takes_json_from_programs_on_this_machine_only() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        url = f"{access.base_url}/chat/completions"
        body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
        good = {"Authorization": f"Bearer {access.api_key}", "Content-Type": "application/json"}
        async with httpx2.AsyncClient() as client:
            for status, change in (
                (415, {"Content-Type": "text/plain"}),
                (403, {"Origin": "http://evil.example"}),
                (403, {"Host": "evil.example"}),
                (401, {"Authorization": "Bearer al_guess"}),
                (200, {}),
            ):
                reply = await client.post(url, content=body, headers={**good, **change})
                assert reply.status_code == status, reply.text
            huge = await client.post(url, content=b" " * (MAX_BODY_BYTES + 1), headers=good)
            assert huge.status_code == 413
        assert len(engine.requests) == 1

    play(["fine"], steps)


@DOORS
def test_a_client_that_hangs_up_ends_its_generation(door: str) -> None:
    async def run() -> None:
        cancelled = asyncio.Event()

        class Endless(ScriptedEngine):
            async def agenerate(self, req: Any) -> Any:
                try:
                    while True:
                        req.on_tokens([40, 41, 42, 43], [-1.0] * 4)
                        await asyncio.sleep(0.001)
                finally:
                    cancelled.set()

        doors = await Listener(AgentService()).open()
        engine = Endless([])
        session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters())  # type: ignore[arg-type]
        client = openai_client(doors.access(doors.service.open(session)), door)
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        async with asyncio.timeout(5):
            await cancelled.wait()
        await close(doors)

    asyncio.run(run())


@DOORS
@pytest.mark.parametrize("stream", [False, True])
def test_the_timeout_of_a_client_ends_its_generation(door: str, stream: bool) -> None:
    async def run() -> None:
        cancelled = asyncio.Event()

        class Hanging(ScriptedEngine):
            async def agenerate(self, req: Any) -> Any:
                try:
                    req.on_tokens and req.on_tokens([40, 41], [-1.0] * 2)
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()

        doors = await Listener(AgentService()).open()
        engine = Hanging([])
        session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters())  # type: ignore[arg-type]
        client = openai_client(doors.access(doors.service.open(session)), door).with_options(timeout=1.0, max_retries=0)
        async with asyncio.timeout(5):
            with pytest.raises((openai.APITimeoutError, httpx2.ReadTimeout)):
                answer: Any = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x"}], stream=stream
                )
                assert stream, "the whole answer cannot come"
                async for _ in answer:
                    pass
            await cancelled.wait()
        await close(doors)

    asyncio.run(run())


def test_calls_through_the_listener_belong_to_the_episode() -> None:
    async def run() -> None:
        episode = Episode(member_idx=3)
        doors = await Listener(AgentService()).open()

        class Recording(ScriptedEngine):
            async def agenerate(self, req: Any) -> Any:
                seen.append(episode_context.current().episode)
                return await super().agenerate(req)

        seen: list[Any] = []
        engine = Recording(["1", "2"])

        async def start() -> AgentAccess:
            episode_context.enter(EpisodeContext(episode=episode))
            session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters())  # type: ignore[arg-type]
            return doors.access(doors.service.open(session))

        access = await asyncio.create_task(start())
        for client in (openai_client(access, "listener"), openai_client(access, "transport")):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert seen == [episode, episode]
        await close(doors)

    asyncio.run(run())


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("ab <stop>tool_cüé🙂\n "), max_size=40),
    sizes=st.lists(st.integers(0, 5), min_size=1),
)
def test_a_text_stream_gives_the_text_before_the_first_stop_and_never_takes_back(text: str, sizes: list[int]) -> None:
    vocabulary = tokenizer()
    ids = vocabulary.encode(text, add_special_tokens=False)
    pieces: list[Piece] = []
    regions = TextRegions(openings=["<tool"])
    stream = TextStream(vocabulary.decode, pieces.append, stops=["stop", "\n "], regions=regions)
    at = turn = 0
    while at < len(ids):
        size = sizes[turn % len(sizes)] or 1
        stream.feed(ids[at : at + size])
        at, turn = at + size, turn + 1
    content = vocabulary.decode(ids)
    for end in ("stop", "\n ", "<tool"):
        content = content.partition(end)[0]
    assert content.startswith("".join(piece.text for piece in pieces))
    stream.finish(content)
    assert "".join(piece.text for piece in pieces) == content


THOUGHTS = "<think>\nFirst this,\nthen that.\n</think>\n\nThe answer is 3."


def test_reasoning_is_streamed_apart_from_the_text_in_every_api() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        client = openai_client(access, "transport")
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(thoughts) == "First this,\nthen that." and sum(map(bool, thoughts)) > 2
        assert "".join(delta.content or "" for delta in deltas) == "The answer is 3."
        async with client.responses.stream(model="m", input="hello") as responses:
            kinds = [event.type async for event in responses]
            final = await responses.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message"]
        assert kinds.count("response.reasoning_text.delta") > 2
        assert final.output_text == "The answer is 3."
        async with anthropic_client(access, "transport").messages.stream(
            model="m", max_tokens=64, messages=messages
        ) as events:
            message = await events.get_final_message()
        thinking, text = message.content
        assert (thinking.type, text.type) == ("thinking", "text")
        assert thinking.thinking == "First this,\nthen that." and text.text == "The answer is 3."  # type: ignore[union-attr]
        await client.responses.create(
            model="m",
            input=[{"role": "user", "content": "hello"}, *final.output, {"role": "user", "content": "go on"}],  # type: ignore[list-item]
        )
        url, headers = f"{access.anthropic_base_url}/v1beta/models/m", {"x-goog-api-key": access.api_key}
        contents: list[Any] = [{"role": "user", "parts": [{"text": "hello"}]}]
        for verb in ("generateContent", "generateContent", "streamGenerateContent?alt=sse"):
            reply = await access.http_client.post(f"{url}:{verb}", json={"contents": contents}, headers=headers)
            if "stream" not in verb:
                (candidate,) = reply.json()["candidates"]
                thought, said = candidate["content"]["parts"]
                assert thought == {"text": "First this,\nthen that.", "thought": True}
                assert said == {"text": "The answer is 3."}
                contents += [candidate["content"], {"role": "user", "parts": [{"text": "go on"}]}]
        assert reply.text.count('"thought":true') > 2
        assert (session.clean_turns, session.forks) == (7, 0)

    async def run() -> None:
        doors = await Listener(AgentService()).open()
        engine = ScriptedEngine([THOUGHTS] * 7, "qwen3")
        session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters())  # type: ignore[arg-type]
        await steps(doors.access(doors.service.open(session)), session, engine)
        await close(doors)

    asyncio.run(run())


@DOORS
def test_instructions_hold_for_one_response_and_other_messages_stay(door: str) -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client, rules = openai_client(access, door), "Be brief."
        kept: list[Any] = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hello"}]
        first = await client.responses.create(model="m", input=kept, top_logprobs=2)
        assert first.instructions is None
        again = {"model": "m", "input": "and now?", "previous_response_id": first.id}
        second = await client.responses.create(**again, instructions=rules)  # type: ignore[call-overload]
        assert second.instructions == rules == (await client.responses.retrieve(second.id)).instructions
        third = await client.responses.create(model="m", input="bye", previous_response_id=second.id)
        roles = [message["role"] for message in session.interactions[third.id].messages]
        assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
        items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
        assert [item.role for item in items] == ["system", "user", "assistant", "user"]  # type: ignore[union-attr]

    play(["one", "two", "three"], steps)


@DOORS
def test_a_message_that_ends_with_an_answer_is_continued(door: str) -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = anthropic_client(access, door)
        messages: list[Any] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "The answer"}]
        common: dict[str, Any] = {"model": "m", "max_tokens": 64}
        reply = await client.messages.create(messages=messages, **common)
        assert reply.content[0].text == " is 4."  # type: ignore[union-attr]
        read = engine.tokenizer.decode(engine.responses[-1].input_tokens)
        assert read.endswith("The answer")
        use = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
        for last in (
            "",
            [{"type": "text", "text": "a"}, use],
            [{"type": "thinking", "thinking": "b", "signature": ""}],
        ):
            await client.messages.create(messages=[messages[0], {"role": "assistant", "content": last}], **common)
            read = engine.tokenizer.decode(engine.responses[-1].input_tokens)
            assert read.endswith("<|im_start|>assistant\n")

    play([" is 4.", "x", "y", "z"], steps)


@DOORS
def test_a_stream_of_an_empty_answer_has_a_block_of_text(door: str) -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        client = anthropic_client(access, door)
        asked: dict[str, Any] = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "?"}]}
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**asked)
        for (block,) in (streamed.content, whole.content):
            assert (block.type, block.text) == ("text", "")

    play(["", ""], steps)
