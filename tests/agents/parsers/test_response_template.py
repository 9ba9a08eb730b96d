"""A tokenizer's response template reads its answers; our formats are for tokenizers without one."""

from __future__ import annotations
import asyncio
import copy
import json
import time
from typing import Any
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.agents.doors.completions import ChatCompletions
from areal_lite.agents.parsers.answer_parser import AnswerParser
from areal_lite.agents.parsers.response_template import ResponseTemplateParser
from areal_lite.agents.session.chat_answer import Piece, TextStream
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.errors import ConfigError
from tests.agents.scripted_engine import ScriptedEngine, create
from tests.fixtures.tool_templates import tool_tokenizer

END = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"}
THINK = {"open": "<think>", "close": "</think>", "content": "text"}
QWEN = {  # as transformers has it for Qwen 2 and 3
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": THINK,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": END,
    },
}
QWEN_CODER = {  # as transformers has it for Qwen 3.5
    **QWEN,
    "fields": {
        "reasoning_content": THINK,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": END,
    },
}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x y"}}\n</tool_call>'


def templated(spec: Any = QWEN, family: str = "qwen3") -> Any:
    tokenizer = copy.deepcopy(tool_tokenizer(family))
    tokenizer.response_template = spec
    return tokenizer


def parser_of(spec: Any = QWEN, **options: Any) -> ResponseTemplateParser:
    return ResponseTemplateParser(spec, **options)


def test_a_tokenizers_template_is_used_unless_a_parser_is_named() -> None:
    assert isinstance(ChatRenderer(templated()).answer_parser, ResponseTemplateParser)
    assert isinstance(ChatRenderer(templated(), reasoning_parser="none").answer_parser, ResponseTemplateParser)
    for others in ({"tool_parser": "hermes"}, {"tools_in_system_prompt": True}):
        assert isinstance(ChatRenderer(templated(), **others).answer_parser, AnswerParser)
    without_content = {**QWEN, "fields": {"reasoning_content": THINK}}
    for spec in (None, without_content):
        assert isinstance(ChatRenderer(templated(spec)).answer_parser, AnswerParser)
    with pytest.raises(ConfigError, match=r"response_template is invalid: .*colour.*rollout\.agents\.tool_parser"):
        ChatRenderer(templated({**QWEN, "colour": 1}))


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "arguments"),
    [
        ("It is 3.", "", "It is 3.", []),
        ("<think>\nhm\n</think>\n\nIt is 3.", "hm", "It is 3.", []),
        (f"<think>hm</think>So: {CALL}", "hm", "So:", [{"a": 1, "b": "x y"}]),
        (f"{CALL}\n{CALL}", "", "", [{"a": 1, "b": "x y"}] * 2),
        (f"before {CALL} after", "", "before after", [{"a": 1, "b": "x y"}]),  # transformers keeps only "after"
        (f"<think>maybe {CALL}</think>no", f"maybe {CALL}", "no", []),
    ],
)
def test_an_answer_is_split_by_the_template(text: str, reasoning: str, content: str, arguments: list[Any]) -> None:
    parsed = parser_of().parse(text, [ADD])
    assert (parsed.reasoning, parsed.content, parsed.unparsable) == (reasoning, content, False)
    assert [json.loads(call["function"]["arguments"]) for call in parsed.tool_calls] == arguments
    assert not parser_of().parse(text, None).tool_calls


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"name": "add", "arguments": {"a": 1,</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        f"{CALL}<tool_call>add",
    ],
)
def test_calls_that_cannot_be_read_are_text(call: str) -> None:
    parsed = parser_of().parse(f"<think>hm</think>So: {call}", [ADD])
    assert (parsed.reasoning, parsed.content, parsed.unparsable) == ("hm", f"So: {call}", True)
    assert not parsed.tool_calls


def test_arguments_reach_the_agent_as_written_or_with_the_type_of_their_schema() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 12345678901234567890, "b": "é\\n7"}}</tool_call>'
    (call,) = parser_of().parse(text, [ADD]).tool_calls
    assert call["function"]["arguments"] == '{"a": 12345678901234567890, "b": "é\\n7"}'
    (call,) = parser_of().parse('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1,"}</tool_call>', [ADD]).tool_calls
    assert call["function"]["arguments"] == '{"a": 1,'
    text = "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n<parameter=b>\n7\n</parameter>\n"
    (call,) = parser_of(QWEN_CODER).parse(text + "</function>\n</tool_call>", [ADD]).tool_calls
    assert call["function"]["arguments"] == '{"a": 7, "b": "7"}'
    bare = '{"name": "add", "arguments": {"a": 1}}'
    (call,) = parser_of().parse(bare, [ADD], bare_json=True).tool_calls
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert parser_of().parse(bare, [ADD]).content == bare


def test_reasoning_stays_text_where_it_is_not_split() -> None:
    parsed = parser_of(splits_reasoning=False).parse(f"<think>hm</think>{CALL}", [ADD])
    assert (parsed.content, parsed.reasoning, len(parsed.tool_calls)) == ("<think>hm</think>", "", 1)


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<function=add>", "</function>", "<parameter=a>",
    "</parameter>", "<|im_end|>", "<|endoftext|>", "\n", " ", "{", "}", '"', "add", "7", "<", "|", "text", "\x01",
]  # fmt: skip


@pytest.mark.parametrize("spec", [QWEN, QWEN_CODER], ids=["json", "xml"])
@pytest.mark.parametrize("prefill", ["", "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_text_fails_and_what_is_streamed_is_the_plain_answer(spec: Any, prefill: str, data: st.DataObject) -> None:
    parser = parser_of(spec)
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14)))
    stops = data.draw(st.sampled_from([[], ["add"]]))
    plain = text.partition("add")[0] if stops else text
    for tools in ([ADD], None):
        parsed = parser.parse(plain, tools, prefill=prefill)
        regions = parser.regions(tools, prefill)
        stream = TextStream(lambda ids: "".join(map(chr, ids)), lambda piece: None, stops=stops, regions=regions)
        at = 0
        while at < len(text):
            end = at + data.draw(st.integers(1, 9))
            stream.feed([ord(character) for character in text[at:end]])
            at = end
            assert parsed.content.startswith(stream.sent)
            assert parsed.reasoning.startswith(stream.reasoning)
        stream.finish(parsed.content, parsed.reasoning)
        assert (stream.sent, stream.reasoning) == (parsed.content, parsed.reasoning)


def test_no_repeated_marker_takes_long() -> None:
    began = time.process_time()
    for fragment in FRAGMENTS:
        parser_of().parse(fragment * (60_000 // len(fragment)), [ADD])
    assert time.process_time() - began < 5


@pytest.mark.parametrize("thinks", [True, False])
def test_a_session_streams_and_answers_alike_and_continues_the_recorded_ids(thinks: bool) -> None:
    answer = f"{'<think>hm</think>' if thinks else ''}So: {CALL}"
    engine = ScriptedEngine([answer, answer, "It is 3."])
    engine.tokenizer = templated()
    session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters())  # type: ignore[arg-type]
    question = {"role": "user", "content": "add"}

    async def play() -> None:
        body = {"messages": [question], "tools": [ADD]}
        message = (await create(session, body))["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == ("So:", "hm" if thinks else None)
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "x y"}
        pieces: list[Piece] = []
        request = ChatCompletions(orjson.dumps(body), session).request
        (streamed,) = await session.answer(request, "second", on_text=lambda _, piece: pieces.append(piece))
        assert "".join(piece.text for piece in pieces if not piece.is_reasoning) == streamed.message["content"] == "So:"
        assert "".join(piece.text for piece in pieces if piece.is_reasoning) == ("hm" if thinks else "")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        await create(session, {"messages": [question, message, result], "tools": [ADD]})

    asyncio.run(play())
    first = engine.responses[1]  # the later of two equal answers
    recorded = first.input_tokens + first.output_tokens
    assert engine.requests[2].input_ids[: len(recorded)] == recorded
    assert (session.forks, session.tool_calls, session.tool_parse_errors) == (0, 2, 0)
