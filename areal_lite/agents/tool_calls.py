"""Parse tool calls from an answer's text: the tags of Hermes and Qwen, and bare JSON. Never raises."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any, NamedTuple, NoReturn

_OPEN = "<tool_call>"
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class ParsedAnswer(NamedTuple):
    """An answer split into its text and its tool calls, in OpenAI's shape."""

    content: str
    tool_calls: list[dict[str, Any]]
    unparsable: bool = False
    """True if a tool call cannot be parsed; ``content`` is then the whole text."""


def parse_tool_calls(text: str, names: Collection[str]) -> ParsedAnswer:
    """Split ``text`` into content and tool calls.

    A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. An answer that is only such an object, or a
    list of them, also counts if it calls tools in ``names``. ``parameters`` is an alias of ``arguments``. If one call
    cannot be parsed, the whole answer stays text.
    """
    if _OPEN in text:
        calls = [_parse_call(match) for match in _TAGGED.findall(text)]
        parsed = [call for call in calls if call is not None]
        if len(parsed) < len(calls):
            return ParsedAnswer(text, [], unparsable=True)
        return ParsedAnswer(_TAGGED.sub("", text).strip(), parsed)
    bare = text.strip()
    if bare[:1] in ("{", "["):
        try:
            value = _loads(bare)
        except (ValueError, RecursionError):
            return ParsedAnswer(text, [])
        calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
        parsed = [call for call in calls if call is not None and call["function"]["name"] in names]
        if parsed and len(parsed) == len(calls):
            return ParsedAnswer("", parsed)
    return ParsedAnswer(text, [])


def _parse_call(text: str) -> dict[str, Any] | None:
    try:
        return _call(_loads(text))
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> dict[str, Any] | None:
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("name"), str)
        or not _NAME.fullmatch(value["name"])
    ):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, written as an escape
        return None
    function = {"name": value["name"], "arguments": text}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_reject_constant)  # orjson would round large integers


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
