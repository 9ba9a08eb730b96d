"""Split an answer's text into reasoning, content and tool calls. Pure text: tokens are never touched.

Guarantees that parsing never raises.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_lite.agents.parsers.call_json import ToolCall, read_bare_calls
from areal_lite.agents.parsers.tool_formats import (
    TOOL_FORMATS,
    Part,
    ToolFormat,
    Tools,
    Unreadable,
    tool_format_of_template,
)

THINK, THINK_END = "<think>", "</think>"


class ParsedAnswer(NamedTuple):
    """The parts of an answer."""

    content: str
    reasoning: str = ""
    tool_calls: Sequence[dict[str, Any]] = ()
    unparsable: bool = False
    """True if a call's arguments are not a JSON object, or its name cannot be read."""

    def message(self) -> dict[str, Any]:
        """Return the assistant message of OpenAI's API, without keys for parts that are empty."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = list(self.tool_calls)
        return message


@dataclass(frozen=True, slots=True)
class AnswerParser:
    tool_format: ToolFormat
    splits_reasoning: bool
    """True if ``<think>...</think>`` at the beginning is reasoning."""

    @property
    def reads_prefill(self) -> bool:
        """True if the end of the prompt can begin the answer."""
        return self.splits_reasoning

    def stream_options(self, tools: Sequence[dict[str, Any]] | None, prefill: str) -> dict[str, Any]:
        """Return how a :class:`.TextStream` reads an answer; from an opening on, text may not be content."""
        return {
            "openings": self.tool_format.starts if tools else (),
            "json_waits": bool(tools) and self.tool_format.bare_json,
            "thinking": prefill.rstrip().endswith(THINK) if self.splits_reasoning else None,
        }

    def reads(self, token: str, *, tools: bool) -> bool:
        """Return whether parsing needs to see ``token``, also where it is a special token."""
        markers = (*self.tool_format.starts, *self.tool_format.markers) if tools else ()
        return token in markers or (self.splits_reasoning and token in (THINK, THINK_END))

    def parse(
        self, text: str, tools: Sequence[dict[str, Any]] | None = None, *, prefill: str = "", bare_json: bool = False
    ) -> ParsedAnswer:
        reasoning, closed, content = self._split_reasoning(text, thinking=prefill.rstrip().endswith(THINK))
        if not tools or not closed:
            return ParsedAnswer(content, reasoning)
        return self._split_calls(content, tools, bare_json)._replace(reasoning=reasoning)

    def _split_reasoning(self, text: str, *, thinking: bool) -> tuple[str, bool, str]:
        body = text.lstrip()
        if not self.splits_reasoning or not (thinking or body.startswith(THINK)):
            return "", True, text
        reasoning, end, content = body.removeprefix(THINK).partition(THINK_END)
        return reasoning.strip(), bool(end), content.lstrip()

    def _split_calls(self, text: str, tools: Sequence[dict[str, Any]], bare_json: bool) -> ParsedAnswer:
        parts: list[Part] = []
        declared = declared_tools(tools)
        if any(start in text for start in self.tool_format.starts):
            parts = list(self.tool_format.split(text, declared))
        elif bare_json or self.tool_format.bare_json:
            parts = ["", *read_bare_calls(text, declared)]
        unparsable = any(isinstance(p, Unreadable) or (isinstance(p, ToolCall) and not p.is_json) for p in parts)
        tool_calls = [
            openai_call(part, self.tool_format.call_id_digits) for part in parts if isinstance(part, ToolCall)
        ]
        if not tool_calls:
            return ParsedAnswer(text, unparsable=unparsable)
        texts = [
            part.text if isinstance(part, Unreadable) else part for part in parts if not isinstance(part, ToolCall)
        ]
        content = "".join([texts[0], *(piece for piece in texts[1:] if piece.strip())]).rstrip()
        if not texts[0].strip():
            content = content.lstrip()
        return ParsedAnswer(content, "", tool_calls, unparsable)


def answer_parser(
    template: str, *, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> AnswerParser:
    """Return the parser of a chat template's answers; the config has checked the names."""
    tool_format = TOOL_FORMATS[tool_parser or tool_format_of_template(template)]
    splits_reasoning = THINK in template if reasoning_parser is None else reasoning_parser == "think"
    return AnswerParser(tool_format, splits_reasoning)


def openai_call(call: ToolCall, id_digits: int = 24) -> dict[str, Any]:
    """Return a call in the form of OpenAI's API, with a new id."""
    prefix = "call_" if id_digits > 9 else ""
    return {
        "id": prefix + uuid.uuid4().hex[:id_digits],
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def declared_tools(tools: Sequence[dict[str, Any]]) -> Tools:
    """Return the JSON schemas of the tools' parameters, by tool and parameter."""
    declared = {}
    for tool in tools:
        parameters = tool["function"].get("parameters")
        schemas = parameters.get("properties") if isinstance(parameters, dict) else None
        declared[tool["function"]["name"]] = schemas if isinstance(schemas, dict) else {}
    return declared
