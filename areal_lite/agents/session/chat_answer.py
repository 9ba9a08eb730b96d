"""Read an answer's ids as a message: whole, and as pieces of text while they are sampled. The ids stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_lite.agents.parsers.answer_parser import THINK, AnswerParser, ParsedAnswer
from areal_lite.agents.parsers.response_template import ResponseTemplateParser
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_request import ChatRequest
from areal_lite.agents.session.text_stream import Piece, TextStream
from areal_lite.api.io_struct import ModelResponse
from areal_lite.config.generation import GenerationHyperparameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the model, before it takes an API's form."""

    id: str
    """Key of its interaction."""
    message: dict[str, Any]
    """Assistant message in OpenAI's form: content, tool_calls, reasoning_content."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    stopped_by: str | None
    """The stop string that ended it."""
    unparsable: bool
    """True if it has a tool call whose name or arguments cannot be parsed."""
    response: ModelResponse


class AnswerReader:
    """Reads the answers to one prompt."""

    def __init__(
        self, renderer: ChatRenderer, request: ChatRequest, prompt: list[int], gconfig: GenerationHyperparameters
    ) -> None:
        self._renderer = renderer
        self._request = request
        self._tools = request.tools if request.parse_tools else None
        self._skip_special_tokens = gconfig.skip_special_tokens
        self._stops = [*(gconfig.stop or []), *request.stop]
        self._parser = renderer.answer_parser if request.prompt is None else None
        self._prompt = prompt
        self._stream: TextStream | None = None

    @functools.cached_property
    def _prefill(self) -> str:
        # Under a grammar there is no reasoning.
        return "" if self._request.grammar else self._renderer.prefill(self._prompt)

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """Return the text that can be sent after these ids; often nothing."""
        if self._stream is None:
            self._stream = self._new_stream()
        return self._stream.feed([token for token in ids if token not in self._renderer.stop_ids])

    def finish(self, answer: Answer) -> list[Piece]:
        """Return the text of the answer that was not sent."""
        message, stream = answer.message, self._stream or self._new_stream()
        return stream.finish(message["content"] or "", message.get("reasoning_content") or "")

    def read(self, response: ModelResponse, answer_id: str) -> Answer:
        """Return the whole answer."""
        text = self._renderer.visible_text(
            response.output_tokens,
            skip_special_tokens=self._skip_special_tokens,
            tools=self._request.parse_tools,
            ended=True,
        )
        stopped_by = min((stop for stop in self._stops if stop in text), key=text.index, default=None)
        if stopped_by is not None:
            text = text.partition(stopped_by)[0]
        parsed = self._parse(text)
        finish_reason: Any = "stop" if response.stop_reason in ("stop", "tool_calls") else "length"
        return Answer(
            id=answer_id,
            message=parsed.message(),
            finish_reason="tool_calls" if parsed.tool_calls else finish_reason,
            stopped_by=stopped_by,
            unparsable=parsed.unparsable,
            response=response,
        )

    def _parse(self, text: str) -> ParsedAnswer:
        bare_json = bool(self._request.grammar)
        match self._parser:
            case None:
                return ParsedAnswer(text)
            case AnswerParser() as parser:
                return parser.parse(text, self._tools, thinking=self._thinking(parser), bare_json=bare_json)
            case ResponseTemplateParser() as parser:
                return parser.parse(text, self._tools, prefill=self._prefill, bare_json=bare_json)

    def _new_stream(self) -> TextStream:
        parser, tools = self._parser, self._request.parse_tools
        if isinstance(parser, ResponseTemplateParser):
            stream = TextStream(self._decode, stops=self._stops, regions=parser.regions(self._tools, self._prefill))
        elif parser is None:
            stream = TextStream(self._decode, stops=self._stops)
        else:
            stream = TextStream(
                self._decode,
                stops=self._stops,
                openings=parser.starts if tools else (),
                json_waits=tools and parser.tool_format.bare_json,
                thinking=self._thinking(parser) if parser.splits_reasoning else None,
            )
        if tools and self._request.grammar:  # the answer is a call as bare JSON
            stream.wait()
        return stream

    def _thinking(self, parser: AnswerParser) -> bool:
        """Return whether the prompt ends with ``<think>``, so that the answer begins with reasoning."""
        return parser.splits_reasoning and self._prefill.rstrip().endswith(THINK)

    def _decode(self, ids: list[int]) -> str:
        return self._renderer.visible_text(
            ids, skip_special_tokens=self._skip_special_tokens, tools=self._request.parse_tools
        )
