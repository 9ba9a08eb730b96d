"""A field of a wrong type, wherever it is in a body, is an error of the request or is ignored: never a server error."""

from __future__ import annotations
import copy
from collections.abc import Iterator
from typing import Any
import pytest
from tests.agents.doors.test_agent_service import call

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/y"}}, "$defs": {"y": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "x"}
MESSAGES = "/v1/messages"
GEMINI = "/v1beta/models/m:generateContent"
WRONG: tuple[Any, ...] = ("json_schema", -1, None, [1], {"type": "function"}, {"a": "x"})
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "s", "name": "n"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "t"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "logprobs": True,
            "top_logprobs": 2,
            "stop": ["x"],
            "logit_bias": {"5": 1},
            "stream_options": {"include_usage": True},
            "metadata": {"a": "b"},
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "tools": [TOOL],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "stream": True,
        },
    ),
    ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"json": SCHEMA}}),
    (
        "/v1/chat/completions",
        {
            "messages": [USER, {"role": "assistant", "content": "x"}],
            "continue_final_message": True,
            "guided_choice": ["x"],
        },
    ),
    ("/v1/completions", {"prompt": [[1, 2]], "logprobs": 2, "stop": ["a"], "max_tokens": 3}),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}], "summary": []},
                {"type": "function_call", "call_id": "1", "name": "f", "namespace": "s", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
            ],
            "instructions": "i",
            "tools": [
                {"type": "function", **FUNCTION},
                {"type": "namespace", "name": "s", "tools": [{"type": "function", **FUNCTION}]},
            ],
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "tool_choice": {"type": "function", "name": "f"},
            "stream": True,
        },
    ),
    (
        MESSAGES,
        {
            "max_tokens": 4,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": []}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "x", "signature": ""},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "stop_sequences": ["x"],
        },
    ),
    (
        MESSAGES,
        {"messages": [USER], "max_tokens": 3, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    (
        GEMINI,
        {
            "contents": [
                {"role": "user", "parts": [{"text": "x"}]},
                {
                    "role": "model",
                    "parts": [{"text": "t", "thought": True}, {"functionCall": {"name": "f", "args": {"a": 1}}}],
                },
                {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"a": 1}, "id": "1"}}]},
            ],
            "systemInstruction": {"parts": [{"text": "s"}]},
            "tools": [{"functionDeclarations": [FUNCTION, {"name": "g", "parametersJsonSchema": SCHEMA}]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
            "labels": {"a": "b"},
        },
    ),
    (
        GEMINI,
        {
            "contents": [{"parts": [{"text": "x"}]}],
            "generationConfig": {
                "maxOutputTokens": 4,
                "stopSequences": ["x"],
                "responseMimeType": "application/json",
                "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
            },
        },
    ),
]


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _places(value[key], (*place, key))


def _changed(body: dict[str, Any], place: tuple[Any, ...], new: object) -> dict[str, Any]:
    changed: Any = copy.deepcopy(body)
    within = changed
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = new
    return changed  # type: ignore[no-any-return]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_field_of_a_wrong_type_is_no_server_error(path: str, body: dict[str, Any]) -> None:
    assert call(body, path=path)[0] == 200
    statuses = {call(_changed(body, place, new), path=path)[0] for place in _places(body) for new in WRONG}
    assert statuses == {200, 400}


def test_what_is_wrong_is_named() -> None:
    text = {**TOOL, "function": {**FUNCTION, "parameters": "x"}}
    for path, body, said in (
        ("/v1/chat/completions", {"tools": [text]}, "tools[0].function.parameters is 'x': send a JSON schema"),
        ("/v1/chat/completions", {"response_format": "json_schema"}, "response_format is 'json_schema': send type"),
        (
            "/v1/chat/completions",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": "f"}},
            "tool_choice is {'type': 'function', 'function': 'f'}: send 'auto'",
        ),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": 1}]}, "input[0].content is 1: send a list"),
    ):
        messages = {"messages": [USER]} if "input" not in body else {}
        status, answer = call({**messages, **body}, path=path)
        assert (status, said in answer["error"]["message"]) == (400, True), answer
