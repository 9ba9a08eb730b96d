"""Split an answer's text into reasoning, content and tool calls. Pure text, without tokens; parsing never raises."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from areal_lite.agents.parsers.call_json import ToolCall, read_bare_calls
from areal_lite.agents.parsers.tool_formats import TOOL_FORMATS, ToolFormat, Tools, Unreadable, tool_format_of_template

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

    def regions(self, tools: Sequence[dict[str, Any]] | None, prefill: str) -> "TextRegions":
        """Return the reader of an answer that arrives in pieces."""
        openings, json_waits = (self.tool_format.starts, self.tool_format.bare_json) if tools else ((), False)
        return TextRegions(self._thinking(prefill), openings=openings, json_waits=json_waits)

    def _thinking(self, prefill: str) -> bool | None:
        return prefill.rstrip().endswith(THINK) if self.splits_reasoning else None

    def reads(self, token: str, *, tools: bool) -> bool:
        """Return whether parsing needs to see ``token``, also where it is a special token."""
        markers = (*self.tool_format.starts, *self.tool_format.markers) if tools else ()
        return token in markers or (self.splits_reasoning and token in (THINK, THINK_END))

    def parse(
        self, text: str, tools: Sequence[dict[str, Any]] | None = None, *, prefill: str = "", bare_json: bool = False
    ) -> ParsedAnswer:
        reasoning, closed, content = _split_reasoning(text, self._thinking(prefill))
        if not tools or not closed:
            return ParsedAnswer(content, reasoning)
        return self._split_calls(content, tools, bare_json)._replace(reasoning=reasoning)

    def _split_calls(self, text: str, tools: Sequence[dict[str, Any]], bare_json: bool) -> ParsedAnswer:
        declared = declared_tools(tools)
        if any(start in text for start in self.tool_format.starts):
            parts = list(self.tool_format.split(text, declared))
        elif bare_json or self.tool_format.bare_json:
            parts = ["", *read_bare_calls(text, declared)]
        else:
            parts = []
        calls = [part for part in parts if isinstance(part, ToolCall)]
        unparsable = any(isinstance(part, Unreadable) for part in parts) or not all(call.is_json for call in calls)
        if not calls:
            return ParsedAnswer(text, unparsable=unparsable)
        others = [part for part in parts if not isinstance(part, ToolCall)]
        first, *rest = (part.text if isinstance(part, Unreadable) else part for part in others)
        content = "".join([first, *(piece for piece in rest if piece.strip())]).rstrip()
        content = content if first.strip() else content.lstrip()
        digits = self.tool_format.call_id_digits
        return ParsedAnswer(content, "", [openai_call(call, digits) for call in calls], unparsable)


class TextRegions:
    """Content and reasoning of an answer while it arrives, as far as no text that follows changes them."""

    content = reasoning = ""
    in_call = False
    """True if the text that follows may not be content."""

    def __init__(self, thinking: bool | None = None, *, openings: Sequence[str] = (), json_waits: bool = False) -> None:
        """Read an answer that may have calls at ``openings``, or be one if it is JSON and ``json_waits``."""
        self._thinking = thinking
        self._openings = openings
        self._json_waits = json_waits
        self._text = ""

    def feed(self, text: str) -> None:
        self._text += text
        begun = self._text.lstrip()
        if self._thinking is not None and len(begun) < len(THINK) and THINK.startswith(begun):
            return
        self.reasoning, closed, content = _split_reasoning(self._text, self._thinking)
        if not closed:
            self.reasoning, _ = text_before(self.reasoning, (THINK_END,))
        elif self._json_waits and content.lstrip()[:1] in ("{", "["):
            self.in_call = True
        else:
            self.content, self.in_call = text_before(content, self._openings)


def text_before(text: str, ends: Sequence[str]) -> tuple[str, bool]:
    """Return the text before any of ``ends``, without trailing space or a partial end, and whether one is there."""
    if found := [at for end in ends if (at := text.find(end)) >= 0]:
        return text[: min(found)].rstrip(), True
    tails = range(max(0, len(text) - max(map(len, ends), default=0) + 1), len(text))
    cut = next((at for at in tails if any(end.startswith(text[at:]) for end in ends)), len(text))
    return text[:cut].rstrip(), False


def _split_reasoning(text: str, thinking: bool | None) -> tuple[str, bool, str]:
    """Return reasoning, whether it ended, and content. ``thinking``: True if the prompt began it, None if not split."""
    body = text.lstrip()
    if thinking is None or not (thinking or body.startswith(THINK)):
        return "", True, text
    reasoning, end, content = body.removeprefix(THINK).partition(THINK_END)
    return reasoning.strip(), bool(end), content.lstrip()


def answer_parser(
    template: str, *, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> AnswerParser:
    """Return the parser of a chat template's answers; the config has checked the names."""
    tool_format = TOOL_FORMATS[tool_parser or tool_format_of_template(template)]
    return AnswerParser(tool_format, THINK in template if reasoning_parser is None else reasoning_parser == "think")


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
