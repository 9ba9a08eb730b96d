"""Grammars that an answer must match, for structured outputs and tool calls that a request forces. Pure."""

import itertools
import json
import re
from typing import Any
from areal_lite.agents.session.request_fields import RequestError, json_bytes, short, typed, wrong

_SERVER_FIELDS = {
    "regex": "regex", "ebnf": "ebnf", "guided_regex": "regex", "guided_grammar": "grammar", "guided_json": "json",
    "guided_choice": "choice",
}  # fmt: skip
"""Fields of SGLang and vLLM that are also a kind of ``structured_outputs``, by its name there."""
_DEFINITIONS = ("$defs", "definitions")
_OTHER_REFERENCE = re.compile(rb'"\$ref":"#(?!/(?:\$defs|definitions)/)')


def answer_grammar(body: dict[str, Any], tools: list[dict[str, Any]] | None) -> dict[str, str]:
    """Return ``{kind: grammar}`` with the kind ``json_schema``, ``regex`` or ``ebnf``; empty if the answer is free.
    Reads ``response_format``, ``tool_choice``, :data:`_SERVER_FIELDS` and vLLM's ``structured_outputs``."""
    found = [
        _call_or_format(body.get("tool_choice"), body.get("response_format"), tools),
        _structured(body.get("structured_outputs")),
        *(_structured({kind: body[name]}) for name, kind in _SERVER_FIELDS.items() if body.get(name)),
    ]
    found = [grammar for grammar in found if grammar]
    if len(found) > 1:
        raise RequestError(
            f"the request sets {len(found)} constraints on the answer (response_format, tool_choice, ...): set one"
        )
    return found[0] if found else {}


def _call_or_format(choice: Any, response_format: Any, tools: list[dict[str, Any]] | None) -> dict[str, str]:
    """Return the schema of the answer that tools and ``response_format`` ask for together. A required call goes before
    the format. A model that may call tools writes either a call, as bare JSON, or an answer in the format."""
    schema = _response_format(response_format)
    calls = _calls(choice, tools)
    if schema is not None and choice in (None, "auto"):
        calls = [_call(tool["function"]) for tool in tools or ()]
    elif calls:
        schema = None
    schemas = calls if schema is None else [*calls, _nested(schema)] if calls else [schema]
    return {"json_schema": json_bytes(_any_of(schemas)).decode()} if schemas else {}


def _response_format(raw: Any) -> dict[str, Any] | None:
    kind = raw.get("type") if isinstance(raw, dict) else raw
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(raw, dict):
        schema = raw.get("json_schema", raw)  # the Responses API has no inner object
        if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
            return dict(schema["schema"])
    raise wrong("response_format", raw, "send type text, json_object, or json_schema with its schema")


def _calls(choice: Any, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the schemas of the calls of which ``tool_choice`` requires one; none if it requires no call."""
    if choice is None or choice in ("auto", "none"):
        return []
    functions = [tool["function"] for tool in tools or ()]
    named = (choice.get("function") or choice) if isinstance(choice, dict) else None
    if isinstance(named, dict) and choice.get("type") == "function":
        functions = [function for function in functions if function["name"] == named.get("name")]
    elif choice != "required":
        hint = "send 'auto', 'none', 'required', or {'type': 'function', 'function': {'name': ...}}"
        raise wrong("tool_choice", choice, hint)
    if not functions:
        raise RequestError(f"tool_choice is {short(choice)} but tools has no such function", param="tool_choice")
    return [_call(function) for function in functions]


def _call(function: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call as bare JSON; definitions of its arguments move to the root."""
    arguments = dict(_nested(function.get("parameters") or {"type": "object"}))
    definitions = {where: arguments.pop(where, {}) for where in _DEFINITIONS}
    properties = {"name": {"const": function["name"]}, "arguments": arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **definitions,
    }


def _nested(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that goes into another one, where only references to its definitions still hold."""
    if _OTHER_REFERENCE.search(json_bytes(schema)):
        raise RequestError("a schema refers to a part of itself: move that part into its $defs", param="tools")
    return schema


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a schema that any of ``schemas`` satisfies; references start at the root, so it has all definitions."""
    definitions: dict[str, dict[str, Any]] = {where: {} for where in _DEFINITIONS}
    for schema, (where, known) in itertools.product(schemas, definitions.items()):
        for name, definition in (typed(where, schema.get(where), dict, "send an object") or {}).items():
            if known.setdefault(name, definition) != definition:
                raise RequestError(
                    f"two schemas define {where}.{short(name)} differently: rename one of them", param="tools"
                )
    bodies = [{name: value for name, value in schema.items() if name not in definitions} for schema in schemas]
    joined = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
    return joined | {where: known for where, known in definitions.items() if known}


def _structured(raw: Any) -> dict[str, str]:
    if not raw:
        return {}
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if name in ("json", "json_schema") and isinstance(value, dict | str):
            return {"json_schema": _schema_text(value)}
        if name in ("regex", "ebnf", "grammar") and isinstance(value, str):
            return {"regex" if name == "regex" else "ebnf": value}
        if name == "choice" and isinstance(value, list) and all(isinstance(choice, str) for choice in value):
            return {"regex": "|".join(map(re.escape, value))}
    raise wrong("structured_outputs", raw, "send an object with json, regex, choice or grammar")


def _schema_text(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, dict):
        return json_bytes(schema).decode()
    try:
        read = json.loads(schema)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict | bool):
        raise RequestError(f"the answer's schema is {short(schema)}: send a JSON schema, as an object or as its text")
    return schema
