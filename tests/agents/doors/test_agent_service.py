"""What an HTTP client can reach, with the real OpenAI SDK and with bodies of any shape."""

from __future__ import annotations
import asyncio
import json
from typing import Any
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.agents.doors.agent_service import MAX_BODY_BYTES, AgentService, Reply
from areal_lite.agents.doors.http_transport import BASE_URL, SharedClient, socket_client
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.errors import ServerError
from tests.agents.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def new_session(answers: Any) -> ChatSession:
    engine = ScriptedEngine(answers)
    return ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("is_async", [False, True])
def test_clients_have_no_timeout_of_their_own(is_async: bool) -> None:
    client = socket_client(is_async=is_async)
    assert {*client.timeout.as_dict().values()} == {None}


def call(body: Any, *, key: str | None = None, method: str = "POST", path: str = CHAT) -> tuple[int, Any]:
    service = AgentService()
    opened = service.open(new_session(lambda _: "hi"))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {key or opened}"}

    async def play() -> Reply:
        reply = await service.handle(method, path, headers, content)
        if isinstance(reply.body, bytes):
            return reply
        return reply._replace(body=b"".join([event async for event in reply.body]))

    status, headers_out, answer = asyncio.run(play())
    assert headers_out["x-should-retry"] == "false"
    assert isinstance(answer, bytes)
    return status, answer if answer.startswith((b"data:", b"event:")) else json.loads(answer)


def test_the_plain_sdk_works_end_to_end() -> None:
    async def play() -> None:
        service = AgentService()
        session = new_session(["hi there", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "bye"])
        client_options: dict[str, Any] = {"base_url": BASE_URL, "http_client": SharedClient(service)}
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        async with openai.AsyncOpenAI(api_key=service.open(session), **client_options) as client:
            messages: list[Any] = [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": "hello"},
            ]
            completion = await client.chat.completions.create(model="x", messages=messages)
            assert completion.choices[0].message.content == "hi there"
            assert completion.model == "x"
            assert completion.usage is not None
            assert completion.usage.completion_tokens > 1
            messages += [completion.choices[0].message, {"role": "user", "content": "go"}]
            completion = await client.chat.completions.create(model="x", messages=messages, tools=tools)
            assert completion.choices[0].message.tool_calls is not None
            assert completion.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'  # type: ignore[union-attr]
            messages.append(completion.choices[0].message.model_dump())
            messages.append({"role": "tool", "tool_call_id": "x", "content": "1"})
            await client.chat.completions.create(model="x", messages=messages, tools=tools)
            assert [model.id async for model in client.models.list()] == ["default"]
        assert list(session.interactions)[0].startswith("chatcmpl-")
        assert session.clean_turns == 2  # with tools, the second request begins anew
        # closing an SDK client closes no other's
        other = openai.AsyncOpenAI(api_key=service.open(new_session(["1"])), **client_options)
        assert (await other.chat.completions.create(**HELLO)).choices[0].message.content == "1"  # type: ignore[call-overload]

    asyncio.run(play())


def test_the_sdk_sees_our_errors_once() -> None:
    async def play() -> None:
        service = AgentService()
        session = new_session([ServerError("no server is left"), KeyError("bug"), "fine"])
        key = service.open(session)
        http_client: Any = SharedClient(service)
        client = openai.AsyncOpenAI(api_key=key, base_url=BASE_URL, http_client=http_client, max_retries=5)
        for error in (ServerError, KeyError):
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(**HELLO)  # type: ignore[call-overload]
            assert isinstance(session.error, error)
        await client.chat.completions.create(**HELLO)  # type: ignore[call-overload]
        assert session.error is None
        service.close(key)
        with pytest.raises(openai.APIStatusError, match="has ended") as ended:
            await client.chat.completions.create(**HELLO)  # type: ignore[call-overload]
        assert (ended.value.status_code, ended.value.code) == (410, "session_ended")  # type: ignore[attr-defined]
        wrong = openai.AsyncOpenAI(api_key="al_guess", base_url=BASE_URL, http_client=http_client, max_retries=5)
        with pytest.raises(openai.AuthenticationError):
            await wrong.chat.completions.create(**HELLO)  # type: ignore[call-overload]

    asyncio.run(play())


def test_keys_are_random_and_only_their_digest_is_kept() -> None:
    service = AgentService()
    keys = {service.open(new_session([])) for _ in range(20)}
    assert len(keys) == 20
    assert all(key.startswith("al_") and len(key) > 40 for key in keys)
    assert not any(key in repr(vars(service)) for key in keys)


@pytest.mark.parametrize(
    ("status", "kwargs"),
    [
        (401, {"key": "al_nobody"}),
        (401, {"key": "ключ\ud800"}),
        (404, {"path": "/v1/embeddings"}),
        (404, {"path": "/" + "x" * 9999}),
        (405, {"method": "GET"}),
        (405, {"path": "/v1/models"}),
        (200, {"method": "GET", "path": "/v1/models"}),
    ],
)
def test_keys_and_paths(status: int, kwargs: Any) -> None:
    assert call(HELLO, **kwargs)[0] == status


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 129}, "at most 128"),
        ({"stream": 1}, "stream is 1"),
        ({"temprature": 1}, "unknown field 'temprature'"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": 3}, "temperature is 3: it must be at most 2"),
        ({"max_tokens": 0}, "at least 1"),
        ({"tool_choice": "required"}, "tools has no such function"),
        ({"tool_choice": "any"}, "send 'auto'"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "regex": "a*"}, "2 constraints"),
        ({"logit_bias": {"one": 5}}, "logit_bias"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stop": [""]}, "stop is"),
        ({"seed": 2**64}, "seed"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "bard", "content": ""}]}, "role is 'bard'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "only text"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "at most 128"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ],
)
def test_bad_fields_are_refused_by_name(change: dict[str, Any], says: str) -> None:
    status, answer = call({**HELLO, **change})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert says in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "change",
    [
        {"n": 1, "stream": False, "stop": None, "user": "u", "metadata": {}, "store": True},
        {"temperature": 0.1, "top_p": 0.2, "presence_penalty": 1, "response_format": {"type": "text"}},
        {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "logit_bias": {}},
    ],
)
def test_fields_that_mean_nothing_here_are_taken(change: dict[str, Any]) -> None:
    assert call({**HELLO, **change})[0] == 200


def test_bodies_that_are_no_json_object_and_bodies_too_large() -> None:
    for body in (b"", b"{", b"\xff", b"[" * 100_000, b'{"messages": "\\ud800"}', b"[]", b"3", b'{"n": NaN}'):
        assert call(body)[0] == 400
    assert call(b" " * (MAX_BODY_BYTES + 1))[0] == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
FIELDS = [
    "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "stream",
    "logprobs", "top_logprobs", "temperature", "top_p", "top_k", "chat_template_kwargs", "functions", "logit_bias",
]  # fmt: skip
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": JSON, "arguments": JSON})}), max_size=2
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
    optional={"content": JSON | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON}), max_size=2),
              "tool_calls": CALLS | JSON, "name": JSON, "tool_call_id": JSON},
)  # fmt: skip
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries({"name": JSON})})
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=3)},
    optional={**{name: JSON for name in FIELDS}, "tools": st.lists(TOOL, max_size=2)},
)


@settings(max_examples=300, deadline=None)
@given(body=JSON | BODY)
def test_no_body_is_answered_with_a_server_error(body: Any) -> None:
    status, answer = call(body)
    assert status in (200, 400), answer


def test_hundreds_of_sessions_at_once_are_isolated() -> None:
    async def play() -> None:
        service = AgentService()
        http_client: Any = SharedClient(service)

        async def episode(index: int) -> ChatSession:
            session = new_session([f"answer {index} {turn}" for turn in range(3)])
            client = openai.AsyncOpenAI(api_key=service.open(session), base_url=BASE_URL, http_client=http_client)
            messages: list[Any] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"question {index}"})
                message = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
                assert message.content == f"answer {index} {turn}"
                messages.append(message)
            return session

        for session in await asyncio.gather(*(episode(i) for i in range(300))):
            assert (session.clean_turns, session.forks, len(session.history.export("concat"))) == (3, 0, 1)

    asyncio.run(play())
