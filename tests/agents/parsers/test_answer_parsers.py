"""Every tool format is parsed back from its own template, and no text makes a parser fail."""

from __future__ import annotations
import json
import time
from typing import Any, get_args, get_type_hints
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.agents.parsers.answer_parser import AnswerParser, ParsedAnswer, answer_parser
from areal_lite.agents.parsers.tool_formats import TOOL_FORMATS, tool_format_of_template
from areal_lite.agents.session.chat_answer import TextStream
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.config.rollout_config import AgentsConfig, InferenceEngineConfig
from tests.fixtures.tool_templates import TOOL_FAMILIES, tool_tokenizer

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
KINDS[type(None)] = "null"
texts = st.text(st.sampled_from("ab 1\n\"'{}[]:,;\\/<>`é水😀\u2028"), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3), max_leaves=8)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.:-]{0,20}", fullmatch=True)
calls = st.tuples(names, st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), values, max_size=4))


def tool(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": KINDS[type(value)]} for key, value in arguments.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def calls_of(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.tool_calls]


def parser_of(name: str, reasoning: str = "none") -> AnswerParser:
    return answer_parser("", tool_parser=name, reasoning_parser=reasoning)


@pytest.mark.parametrize("family_name", [name for name in TOOL_FAMILIES if name != "smollm2"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_calls_rendered_by_a_template_are_parsed_back(family_name: str, data: st.DataObject) -> None:
    family = TOOL_FAMILIES[family_name]
    drawn = data.draw(st.lists(calls, min_size=1, max_size=1 if family.one_call else 3, unique_by=lambda c: c[0]))
    content = data.draw(st.sampled_from(["", "Let me see. Ä {x}"])) if family.content_with_calls else ""
    tools = [tool(*call) for call in drawn]
    renderer = ChatRenderer(tool_tokenizer(family_name))
    tool_calls = [
        {"id": "abcdef123", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in drawn
    ]
    assistant = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    text = renderer._render([{"role": "user", "content": "x"}, assistant], tools, {})
    answer = text.split(family.assistant)[1].split(family.eos)[0]
    if family_name == "glm45":
        answer = answer.split("<|assistant|>")[0]
    parsed = renderer.answer_parser.parse(answer, tools)
    assert calls_of(parsed) == drawn
    assert (parsed.content.strip(), parsed.reasoning, parsed.unparsable) == (content, "", False)


@settings(max_examples=30, deadline=None)
@given(drawn=st.lists(calls, min_size=1, max_size=3), before=st.booleans())
def test_function_tags_and_fences_are_parsed_back(drawn: list[tuple[str, Any]], before: bool) -> None:
    tools = [tool(*call) for call in drawn]
    intro = "first\n" if before else ""
    tags = [f"<function={name}>{json.dumps(arguments, ensure_ascii=False)}</function>" for name, arguments in drawn]
    parsed = parser_of("function_tag").parse(intro + "\n".join(tags), tools)
    assert (calls_of(parsed), parsed.content, parsed.unparsable) == (drawn, intro.strip(), False)
    fences = [f"```json\n{json.dumps({'name': n, 'arguments': a}, indent=1)}\n```" for n, a in drawn]
    parsed = parser_of("fenced_json").parse(intro + "\n".join(fences), tools)
    assert (calls_of(parsed), parsed.content, parsed.unparsable) == (drawn, intro.strip(), False)


ADD = tool("add", {"a": 1, "b": "x", "c": True, "d": None, "e": []})


@pytest.mark.parametrize(
    ("name", "text", "expected", "content"),
    [
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}',
         [("add", {"a": 1}), ("add", {})], ""),
        ("llama3", ' {"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})], ""),
        ("llama3", '{"name": "unknown", "parameters": {"a": 1}}', [], '{"name": "unknown", "parameters": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123456[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 2}',
         [("add", {"a": 1}), ("add", {"a": 2})], ""),
        ("mistral", 'So [TOOL_CALLS] [{"name": "add", "arguments": {}}] there', [("add", {})], "So  there"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"b": "</tool_call>"}}</tool_call>',
         [("add", {"b": "</tool_call>"})], ""),
        ("hermes", '<tool_call>[{"name": "add"}, {"name": "add", "arguments": "{\\"a\\": 1}"}]</tool_call>',
         [("add", {}), ("add", {"a": 1})], ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}\n<tool_call>{"name": "add", "arguments": {}}',
         [("add", {}), ("add", {})], ""),
        ("hermes", '{"type": "function", "function": {"name": "add", "arguments": {}}}', [("add", {})], ""),
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>7</arg_value></tool_call>", [("add", {"a": 7})], ""),
        ("glm45", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', [("add", {})], ""),
        ("qwen3_coder", "Hi<function=add><parameter=a>\n7\n</parameter><parameter=d>None</parameter></function>",
         [("add", {"a": 7, "d": None})], "Hi"),
        ("qwen3_coder", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', [("add", {})], ""),
        ("qwen3_coder", "<function=add>\n<parameter=b>\n</function>\n</parameter>\n</function>",
         [("add", {"b": "</function>"})], ""),
        ("fenced_json", '```json\n{"x": 1}\n```\nthen\n```\n{"name": "add"}\n```', [("add", {})],
         '```json\n{"x": 1}\n```\nthen'),
    ],
)  # fmt: skip
def test_variants_of_the_formats(name: str, text: str, expected: list[Any], content: str) -> None:
    parsed = parser_of(name).parse(text, [ADD])
    assert (calls_of(parsed), parsed.content, parsed.unparsable) == (expected, content, False)


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("7", {"type": "integer"}, 7),
        ("7", {"type": "string"}, "7"),
        ("7", {}, 7),
        ("x", {"type": "integer"}, "x"),
        ("7.5", {"type": "integer"}, "7.5"),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("7", {"enum": ["7", "8"]}, "7"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ('"quoted"', None, '"quoted"'),
        ("NaN", {"type": "number"}, "NaN"),
    ],
)
def test_plain_values_get_the_type_of_their_schema(value: str, schema: Any, expected: Any) -> None:
    declared = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    for name, text in (
        ("glm45", f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"),
        (
            "qwen3_coder",
            f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>",
        ),
    ):
        assert calls_of(parser_of(name).parse(text, [declared])) == [("f", {"x": expected})]


BROKEN = {
    "hermes": '<tool_call>{{"name": "add", "arguments": {0}}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n{0}\n</function>\n</tool_call>",
    "function_tag": "<function=add>{0}</function>",
    "llama3": '<|python_tag|>{{"name": "add", "parameters": {0}}}',
    "mistral": "[TOOL_CALLS]add[ARGS]{0}",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{0}<｜tool▁call▁end｜>",
    "glm45": "<tool_call>add\n{0}\n</tool_call>",
    "fenced_json": '```json\n{{"name": "add", "arguments": {0}}}\n```',
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("arguments", ["a=1", '{"a": 1,', "{'a': 1", '{"a": ' + "[" * 100_000])
def test_arguments_that_are_not_json_are_given_as_written(name: str, arguments: str) -> None:
    parsed = parser_of(name).parse("so: " + BROKEN[name].format(arguments), [ADD])
    (call,) = parsed.tool_calls
    assert call["function"] == {"name": "add", "arguments": arguments}
    assert (parsed.content, parsed.unparsable) == ("so:", True)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_300_levels_of_nesting_are_parsed(name: str) -> None:
    nested = '{"a": ' + "[" * 300 + "]" * 300 + "}"
    parsed = parser_of(name).parse(BROKEN[name].format(nested), [ADD])
    assert (calls_of(parsed), parsed.unparsable) == ([("add", json.loads(nested))], False)


FRAGMENTS = [
    *(marker for form in TOOL_FORMATS.values() for marker in (*form.starts, *form.markers)),
    "<think>", "</think>", "<function=add>", "<parameter=a>", "</parameter>", "</function>", "```json\n", "```", "\n",
    " ", "[", "]", "{", "}", '"', ":", ",", ";", "\\", "function", "add", '"name": "add"', '"arguments": ', "1", "é",
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {"a": ', "NaN", "<", "|", "text", "\x00",
]  # fmt: skip


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14), thinking=st.booleans())
def test_no_text_fails_and_what_is_streamed_is_the_beginning_of_the_content(
    name: str, pieces: list[str], thinking: bool
) -> None:
    parser = parser_of(name, "think")
    text = "".join(pieces)
    for tools in ([ADD], None):
        parsed = parser.parse(text, tools, prefill="<think>" if thinking else "")
        for call in parsed.tool_calls:
            assert call["function"]["name"]
            if not parsed.unparsable:
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
        stream = text_stream(parser, tools=tools is not None, thinking=thinking)
        for character in text:
            stream.feed([ord(character)])
            assert parsed.content.startswith(stream.sent)
            assert parsed.reasoning.startswith(stream.reasoning)
        stream.finish(parsed.content, parsed.reasoning)
        assert (stream.sent, stream.reasoning) == (parsed.content, parsed.reasoning)


def test_a_stop_within_the_reasoning_is_not_streamed() -> None:
    regions = parser_of("hermes", "think").regions(None, "")
    stream = TextStream(lambda ids: "".join(map(chr, ids)), lambda piece: None, stops=["END"], regions=regions)
    for character in "<think>so farEND</think>more":
        stream.feed([ord(character)])
    assert (stream.reasoning, stream.sent) == ("so far", "")


def text_stream(parser: AnswerParser, *, tools: bool, thinking: bool = False) -> TextStream:
    regions = parser.regions([ADD] if tools else None, "<think>" if thinking else "")
    return TextStream(lambda ids: "".join(map(chr, ids)), lambda piece: None, regions=regions)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_repeated_marker_takes_long(name: str) -> None:
    parser = parser_of(name, "think")
    began = time.process_time()
    for fragment in FRAGMENTS:
        parser.parse(fragment * (100_000 // len(fragment)), [ADD])
    assert time.process_time() - began < 2  # all together about 0.1 s


@pytest.mark.parametrize("family_name", TOOL_FAMILIES)
def test_the_template_chooses_the_parsers(family_name: str) -> None:
    family = TOOL_FAMILIES[family_name]
    parser = ChatRenderer(tool_tokenizer(family_name)).answer_parser
    assert parser.tool_format is TOOL_FORMATS[family.parser]
    assert parser.splits_reasoning == ("<think>" in family.template)
    assert set(parser.tool_format.starts) >= set(TOOL_FORMATS[family.parser].starts)
    named = ChatRenderer(tool_tokenizer(family_name), tool_parser="mistral", reasoning_parser="none").answer_parser
    assert (named.tool_format, named.splits_reasoning) == (TOOL_FORMATS["mistral"], False)


def test_templates_that_instruct_with_functions_or_fences_are_recognised() -> None:
    assert tool_format_of_template("use <function=name>{...}</function>") == "function_tag"
    assert tool_format_of_template("reply with ```json") == "fenced_json"
    assert tool_format_of_template('<|start_header_id|> {"name": ..., "parameters": ...}') == "llama3"
    assert tool_format_of_template("{{ messages[0].content }}") == "hermes"


def test_unknown_parsers_are_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="hermes.*glm45"):
        InferenceEngineConfig(agents={"tool_parser": "hermess"})  # type: ignore[arg-type]
    literal = get_args(get_type_hints(AgentsConfig)["tool_parser"])[0]
    assert list(get_args(literal)) == list(TOOL_FORMATS)


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\n3", False, "hm", "3"),
        ("hm\n</think>\n\n3", True, "hm", "3"),
        ("<think>hm</think>3", True, "hm", "3"),
        ("<think>\n\n</think>\n\n3", False, "", "3"),
        ("<think>cut", False, "cut", ""),
        ("cut", True, "cut", ""),
        ("a </think> b", False, "", "a </think> b"),
        ("a <think> b", False, "", "a <think> b"),
        (" 3", False, "", " 3"),
    ],
)
def test_reasoning_is_split_off(text: str, thinking: bool, reasoning: str, content: str) -> None:
    parsed = parser_of("hermes", "think").parse(text, prefill="<think>" if thinking else "")
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_calls_inside_of_reasoning_are_not_calls() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parsed = parser_of("hermes", "think").parse(f"<think>maybe {call}</think>{call}", [ADD])
    assert (parsed.reasoning, len(parsed.tool_calls)) == (f"maybe {call}", 1)
    assert not parser_of("hermes", "think").parse(f"<think>maybe {call}", [ADD]).tool_calls


def test_streamed_text_stops_at_white_space_and_at_the_beginning_of_a_marker() -> None:
    parser = parser_of("hermes", "think")
    for text, sent in (
        ("<thi", ""),
        ("<think>a </thi", ""),
        ("<think>a</think>\nHi \n", "Hi"),
        ("Hi <tool", "Hi"),
        ('{"name"', ""),
    ):
        stream = text_stream(parser, tools=True)
        for character in text:
            stream.feed([ord(character)])
        assert stream.sent == sent
