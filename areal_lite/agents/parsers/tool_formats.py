"""The formats in which model families write tool calls. Pure text; never raises.

A format splits an answer into text, calls, and calls whose name cannot be read. Repeated markers take linear time,
because models that loop write thousands of them.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from areal_lite.agents.parsers import call_json
from areal_lite.agents.parsers.call_json import ToolCall, call_with_arguments, dump_json, is_name, read_json

Tools = Mapping[str, Mapping[str, Any]]
"""Declared tools: name -> JSON schemas of the parameters by their names."""


class Unreadable(NamedTuple):
    """A call whose name cannot be read; it stays text."""

    text: str


Part = str | ToolCall | Unreadable


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one model family writes tool calls."""

    split: Callable[[str, Tools], Iterator[Part]]
    starts: tuple[str, ...]
    """Texts at which a call may begin."""
    markers: tuple[str, ...] = ()
    """Other markers that may be special tokens of the tokenizer."""
    bare_json: bool = False
    """True if an answer that is only JSON and names declared tools is a call."""
    call_id_digits: int = 24
    """Mistral's templates require ids of 9 letters and digits; elsewhere ids are call_ and 24 digits."""


def hermes(text: str, tools: Tools) -> Iterator[Part]:
    """Hermes, Qwen 2.5 and 3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    for outside, body, whole in _blocks(text, "<tool_call>", "</tool_call>"):
        yield outside
        if whole:
            yield from _calls(body, whole)


_GLM_ARGUMENT = re.compile(
    r"<arg_key>((?:(?!</?arg_key>).)*)</arg_key>\s*<arg_value>((?:(?!</?arg_value>).)*)</arg_value>\s*", re.DOTALL
)


def glm45(text: str, tools: Tools) -> Iterator[Part]:
    """GLM 4.5: ``<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>``."""
    for outside, body, whole in _blocks(text, "<tool_call>", "</tool_call>"):
        yield outside
        start = _first(body, 0, "<arg_key>", "\n")
        name = body[:start].strip()
        if is_name(name):
            values, end = _values(_GLM_ARGUMENT, body, start, tools.get(name, {}))
            arguments = dump_json(values) if end == len(body) else None
            yield call_with_arguments(name, body[start:]) if arguments is None else ToolCall(name, arguments)
        elif whole:
            yield from _calls(body, whole)


_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]*)>")
_FUNCTION_END = re.compile(r"\s*(?:</function>)?(?:\s*</tool_call>)?")
_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?((?:(?!<parameter=|</parameter>).)*?)\n?</parameter>\s*", re.DOTALL)
_AFTER_FUNCTION = re.compile(r"\s*(?:</function>|</tool_call>|<tool_call>|<function=|\Z)")


def function_tag(text: str, tools: Tools) -> Iterator[Part]:
    """``<function=name>`` with JSON or, Qwen3-Coder, ``<parameter=key>value</parameter>``; also in ``<tool_call>``."""
    position = 0
    while (opening := _FUNCTION.search(text, position)) is not None:
        yield from hermes(text[position : opening.start()], tools)
        name = opening[1].strip()
        call, end = _function_call(name, text, opening.end(), tools.get(name, {}))
        closing = _FUNCTION_END.match(text, end)
        position = closing.end() if closing and closing[0].strip() else end
        yield call if is_name(name) else Unreadable(text[opening.start() : position])
    if "<function=" in text[position:]:
        yield Unreadable(text[position:])
    else:
        yield from hermes(text[position:], tools)


def _function_call(name: str, text: str, start: int, schemas: Mapping[str, Any]) -> tuple[ToolCall, int]:
    """Return the call whose arguments begin at ``start``, and where they end."""
    found = read_json(text, start)
    if found is not None and _AFTER_FUNCTION.match(text, found[1]):
        return call_with_arguments(name, text[start : found[1]]), found[1]
    values, end = _values(_PARAMETER, text, start, schemas)
    if _AFTER_FUNCTION.match(text, end) and (arguments := dump_json(values)) is not None:
        return ToolCall(name, arguments), end
    end = _first(text, start, "</function>", "<tool_call>", "<function=")
    return ToolCall(name, text[start:end].strip(), is_json=False), end


def llama3(text: str, tools: Tools) -> Iterator[Part]:
    """Llama 3: ``<|python_tag|>{"name": ..., "parameters": {...}}``, or only the JSON; ``;`` separates calls."""
    before, *rest = text.split("<|python_tag|>")
    yield before
    for body in rest:
        yield from _calls(body, "<|python_tag|>" + body)


_MISTRAL_NAME = re.compile(rf"\s*({call_json.NAME})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]*\s*)?(\[ARGS\])?\s*")


def mistral(text: str, tools: Tools) -> Iterator[Part]:
    """Mistral: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, later ``[TOOL_CALLS]name[ARGS]{...}``."""
    before, *rest = text.split("[TOOL_CALLS]")
    yield before
    for body in rest:
        name = _MISTRAL_NAME.match(body)
        found = read_json(body, name.end() if name else 0)
        end = found[1] if found and isinstance(found[0], dict | list) else len(body)
        if name and (name[2] or body[name.end() :].startswith("{")):
            yield call_with_arguments(name[1], body[name.end() : end])
        else:
            yield from _calls(body[:end], "[TOOL_CALLS]" + body[:end])
        yield body[end:]


_DEEPSEEK_CALLS, _DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"


def deepseek(text: str, tools: Tools) -> Iterator[Part]:
    """DeepSeek, in begin and end tokens: V3, R1 ``function<sep>name``, a line, fenced JSON; V3.1 ``name<sep>{...}``."""
    if _DEEPSEEK_CALLS in text and _DEEPSEEK_CALL not in text:
        yield Unreadable(text)
        return
    for outside, body, whole in _blocks(text, _DEEPSEEK_CALL, _DEEPSEEK_CALL_END):
        yield outside.replace(_DEEPSEEK_CALLS, "").replace(_DEEPSEEK_CALLS_END, "")
        if not whole:
            continue
        name, separator, arguments = body.replace(_DEEPSEEK_CALLS_END, "").partition(_DEEPSEEK_SEPARATOR)
        first_line, _, rest = arguments.partition("\n")
        if is_name(first_line.strip()) and rest.lstrip().startswith("```"):
            name = first_line
            arguments = rest.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
        name = name.strip()
        yield call_with_arguments(name, arguments) if separator and is_name(name) else Unreadable(whole)


_FENCE = re.compile(r"```(?:json|tool_calls?)?[ \t]*\n")


def fenced_json(text: str, tools: Tools) -> Iterator[Part]:
    """A code fence with the JSON of calls to declared tools; every other fence is text."""
    position = 0
    while (opening := _FENCE.search(text, position)) is not None:
        end = _body_end(text, opening.end(), "```", "```")
        calls = call_json.read_calls(text[opening.end() : end])
        after = min(end + 3, len(text))
        if calls and all(call.name in tools for call in calls):
            yield text[position : opening.start()]
            yield from calls
        else:
            yield text[position:after]
        position = after
    yield text[position:]


def _calls(body: str, whole: str) -> Sequence[Part]:
    return call_json.read_calls(body) or [Unreadable(whole)]


def _blocks(text: str, opening: str, closing: str) -> Iterator[tuple[str, str, str]]:
    """Yield each block as text before it, body, whole; the last may lack its end. Text after it has an empty whole."""
    position = 0
    while (start := text.find(opening, position)) >= 0:
        outside, body = text[position:start], start + len(opening)
        end = _body_end(text, body, closing, opening)
        position = end + len(closing) if text.startswith(closing, end) else end
        yield outside, text[body:end], text[start:position]
    yield text[position:], "", ""


def _body_end(text: str, start: int, closing: str, opening: str) -> int:
    """Return where a block's body ends: after its JSON, in whose texts markers may stand, or at the next marker."""
    found = read_json(text, start)
    if found is not None:
        end = call_json.skip_space(text, found[1])
        if end == len(text) or text.startswith((closing, opening), end):
            return end
    return _first(text, start, closing, opening)


def _first(text: str, start: int, *markers: str) -> int:
    """Return the index of the first of ``markers`` from ``start`` on, or the text's length."""
    match = _any_of(markers).search(text, start)
    return match.start() if match else len(text)


@functools.cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _values(argument: re.Pattern[str], text: str, start: int, schemas: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the arguments from ``start`` on, each a match of key and value, and where they end."""
    values: dict[str, Any] = {}
    position = call_json.skip_space(text, start)
    while (found := argument.match(text, position)) is not None:
        key = found[1].strip()
        values[key] = call_json.typed_value(found[2], schemas.get(key))
        position = found.end()
    return values, position


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(hermes, ("<tool_call>",), ("</tool_call>",), bare_json=True),
    "qwen3_coder": ToolFormat(function_tag, ("<tool_call>", "<function="), ("</tool_call>",)),
    "function_tag": ToolFormat(function_tag, ("<tool_call>", "<function="), ("</tool_call>",)),
    "llama3": ToolFormat(llama3, ("<|python_tag|>",), bare_json=True),
    "mistral": ToolFormat(mistral, ("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]"), call_id_digits=9),
    "deepseek": ToolFormat(
        deepseek, (_DEEPSEEK_CALLS, _DEEPSEEK_CALL), (_DEEPSEEK_CALLS_END, _DEEPSEEK_CALL_END, _DEEPSEEK_SEPARATOR)
    ),
    "glm45": ToolFormat(
        glm45, ("<tool_call>",), ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    ),
    "fenced_json": ToolFormat(fenced_json, ("```",), bare_json=True),
}
"""Formats by the names of ``rollout.agents.tool_parser``."""
_SIGNS = (
    ("deepseek", (_DEEPSEEK_CALL,)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("function_tag", ("<function=",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    ("fenced_json", ("```json",)),
)
"""Texts of a chat template that show its format, the most specific first."""


def tool_format_of_template(template: str) -> str:
    """Return the name of the format that a chat template writes; Hermes if it writes none."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "hermes")
