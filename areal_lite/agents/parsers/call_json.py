"""Read tool calls written as JSON, also if the JSON is broken. Never raises, whatever the depth or the text."""

import json
import re
from collections.abc import Container
from typing import Any, NamedTuple, NoReturn

NAME = r"[A-Za-z0-9_.:-]{1,128}"
_NAME = re.compile(NAME)
_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[\s,;\[\]]*")
_BROKEN_CALL = re.compile(
    r"[\[\s]*\{\s*['\"]name['\"]\s*:\s*['\"]" + f"({NAME})" + r"['\"]\s*,\s*['\"](?:arguments|parameters)['\"]\s*:"
)
_JSON_BEGINS = frozenset('{["-0123456789tfn')
_LITERALS = {"True": True, "False": False, "None": None}
_KINDS: dict[type, set[str]] = {
    **{type(None): {"null"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}},
    **{str: {"string"}, list: {"array"}, dict: {"object"}},
}


class ToolCall(NamedTuple):
    """One call as the agent gets it."""

    name: str
    arguments: str
    is_json: bool = True
    """False if the arguments are not a JSON object; ``arguments`` is then what the model wrote."""


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def skip_space(text: str, position: int, skipped: re.Pattern[str] = _SPACE) -> int:
    """Return the position of the next character that is not white space, or not ``skipped``."""
    match = skipped.match(text, position)
    return match.end() if match else position


def read_json(text: str, position: int = 0) -> tuple[Any, int] | None:
    """Return the JSON value at ``position``, after white space, and the position after it; None if there is none."""
    position = skip_space(text, position)
    if text[position : position + 1] not in _JSON_BEGINS:  # an error of the decoder takes time linear in the text
        return None
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None


def dump_json(value: Any) -> str | None:
    """Return ``value`` as JSON; None if it has no JSON form (infinity, lone surrogates) or is nested too deeply."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return text


def call_with_arguments(name: str, arguments: str) -> ToolCall:
    """Return a call whose arguments the model wrote as ``arguments``; no text means no arguments."""
    arguments = arguments.strip()
    value, end = read_json(arguments or "{}") or (None, 0)
    if isinstance(value, dict) and end >= len(arguments) and (text := dump_json(value)) is not None:
        return ToolCall(name, text)
    return ToolCall(name, arguments, is_json=False)


def read_calls(text: str) -> list[ToolCall] | None:
    """Return the calls in ``text``: JSON objects one after another, or a list of them; None if there is anything else,
    or a name cannot be read. If the JSON is broken after a name, the rest of the text is that call's arguments."""
    calls: list[ToolCall] = []
    start = skip_space(text, 0, _SEPARATORS)
    while start < len(text):
        found = read_json(text, start)
        end = found[1] if found else len(text)
        call = (read_call(found[0]) if found else None) or _broken_call(text[start:end])
        if call is None:
            return None
        calls.append(call)
        start = skip_space(text, end, _SEPARATORS)
    return calls or None


def read_bare_calls(text: str, declared: Container[str]) -> list[ToolCall]:
    """Return the calls of an answer that is only JSON and names declared tools; empty for any other answer."""
    calls = read_calls(text) if text.lstrip()[:1] in ("{", "[") else None
    return calls if calls and all(call.name in declared for call in calls) else []


def typed_value(text: str, schema: Any) -> Any:
    """Return an argument written as plain text as a value of its JSON schema's type; text that has none of the declared
    types stays text. Without a schema, JSON becomes its value."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    bare = text.strip()
    found = (_LITERALS[bare], len(bare)) if bare in _LITERALS else read_json(bare)
    if found is None or found[1] < len(bare) or isinstance(found[0], str):
        return text
    return found[0] if not kinds or _KINDS[type(found[0])] & kinds else text


def read_call(value: Any) -> ToolCall | None:
    """Return a call written as an object, also below ``function``; None if its name cannot be read."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not is_name(name):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return call_with_arguments(name, arguments)
    text = dump_json({} if arguments is None else arguments)
    return None if text is None else ToolCall(name, text, isinstance(arguments, dict | None))


def _broken_call(text: str) -> ToolCall | None:
    if (header := _BROKEN_CALL.match(text)) is None:
        return None
    found = read_json(text, header.end())
    if found is not None and not text[found[1] :].strip(" \n\t\r]}"):  # only the end of the object is missing
        return call_with_arguments(header[1], text[header.end() : found[1]])
    return ToolCall(header[1], text[header.end() :].rstrip(" \n\t\r]").removesuffix("}").strip(), is_json=False)


def _kinds(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    kinds = {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            if isinstance(option, dict) and isinstance(option.get("type"), str):
                kinds.add(option["type"])
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = set().union(*(_KINDS[type(value)] for value in schema["enum"]))
    return kinds


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)  # orjson would round large integers
