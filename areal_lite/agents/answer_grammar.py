"""Which grammar an answer must match: structured outputs, and tool calls that a request forces. Pure."""

from __future__ import annotations

import re
from typing import Any

import orjson

from areal_lite.agents.request_fields import RequestError, short

_SERVER_FIELDS = {"regex": "regex", "ebnf": "ebnf", "guided_regex": "regex", "guided_grammar": "ebnf"}
"""Fields of SGLang and vLLM that hold a grammar as text, and the grammar's kind."""


def answer_grammar(body: dict[str, Any], tools: list[dict[str, Any]] | None) -> dict[str, str]:
    """Return ``{kind: grammar}`` with the kind ``json_schema``, ``regex`` or ``ebnf``; empty if the answer is free.

    Reads ``response_format``, ``tool_choice``, SGLang's ``regex`` and ``ebnf``, vLLM's ``guided_*`` and
    ``structured_outputs``.

    Raises:
        RequestError: If there are several, or one has another form.
    """
    found = [
        grammar
        for grammar in (
            _response_format(body.get("response_format")),
            _forced_call(body.get("tool_choice"), tools),
            _structured(body.get("structured_outputs")),
            *(_structured({kind: body[name]}) for name, kind in _SERVER_FIELDS.items() if body.get(name)),
            *(
                _structured({name[7:]: body[name]})
                for name in ("guided_json", "guided_choice")
                if body.get(name)
            ),
        )
        if grammar
    ]
    if len(found) > 1:
        raise RequestError(
            f"the request sets {len(found)} constraints on the answer (response_format, tool_choice, ...): set one"
        )
    return found[0] if found else {}


def _response_format(raw: Any) -> dict[str, str]:
    kind = raw.get("type") if isinstance(raw, dict) else raw
    if kind is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type":"object"}'}
    if kind == "json_schema":
        schema = raw.get("json_schema", raw)  # the Responses API has no inner object
        if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
            return {"json_schema": orjson.dumps(schema["schema"]).decode()}
    raise RequestError(
        f"response_format is {short(raw)}: send type text, json_object, or json_schema with its schema",
        param="response_format",
    )


def _forced_call(choice: Any, tools: list[dict[str, Any]] | None) -> dict[str, str]:
    """Return the schema of a tool call as bare JSON, if ``tool_choice`` requires one."""
    if choice is None or choice in ("auto", "none"):
        return {}
    functions = [tool["function"] for tool in tools or ()]
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = (choice.get("function") or choice).get("name")
        functions = [function for function in functions if function["name"] == name]
    elif choice != "required":
        raise RequestError(
            f"tool_choice is {short(choice)}: send 'auto', 'none', 'required', or "
            "{'type': 'function', 'function': {'name': ...}}",
            param="tool_choice",
        )
    if not functions:
        raise RequestError(
            f"tool_choice is {short(choice)} but tools has no such function", param="tool_choice"
        )
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        arguments = dict(function.get("parameters") or {"type": "object"})
        definitions |= arguments.pop("$defs", {})  # references start at the root of the schema
        properties = {"name": {"const": function["name"]}, "arguments": arguments}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    schema = {"anyOf": calls} if len(calls) > 1 else calls[0]
    return {"json_schema": orjson.dumps({**schema, "$defs": definitions} if definitions else schema).decode()}


def _structured(raw: Any) -> dict[str, str]:
    """Return the grammar of vLLM's ``structured_outputs``."""
    if not raw:
        return {}
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if name in ("json", "json_schema") and isinstance(value, dict | str):
            return {"json_schema": value if isinstance(value, str) else orjson.dumps(value).decode()}
        if name in ("regex", "ebnf", "grammar") and isinstance(value, str):
            return {"regex" if name == "regex" else "ebnf": value}
        if name == "choice" and isinstance(value, list) and all(isinstance(choice, str) for choice in value):
            return {"regex": "|".join(map(re.escape, value))}
    raise RequestError(
        f"structured_outputs is {short(raw)}: send an object with json, regex, choice or grammar",
        param="structured_outputs",
    )
