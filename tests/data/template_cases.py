"""The conversations that every real chat template is tried with; each text of a message occurs once."""

from __future__ import annotations
from typing import Any

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


TOOL = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "string", "description": "A number."}},
            "required": ["first"],
        },
    },
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "add_numbers", "arguments": {"first": "argument one"}},
}
CONVERSATIONS: dict[str, tuple[list[Message], list[Any] | None]] = {
    "single turn": ([user("question one"), assistant("answer one")], None),
    "several turns": (
        [user("question one"), assistant("answer one"), user("question two"), assistant("answer two")],
        None,
    ),
    "system": ([system("system text"), user("question one"), assistant("answer one")], None),
    "tools": (
        [
            user("question one"),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "call00001", "name": "add_numbers", "content": "result one"},
            assistant("answer one"),
        ],
        [TOOL],
    ),
    "thinking": (
        [
            user("question one"),
            assistant("answer one", reasoning_content="thought one"),
            user("question two"),
            assistant("answer two", reasoning_content="thought two"),
        ],
        None,
    ),
    "empty system": ([system(""), user("question one"), assistant("answer one")], None),
}
