"""Read an answer's ids as a message: whole, and as pieces of text while they are sampled. The ids stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_lite.agents.parsers.answer_parser import ParsedAnswer
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_request import ChatRequest
from areal_lite.agents.session.text_stream import Piece, TextStream
from areal_lite.api.io_struct import ModelResponse
from areal_lite.config.generation import GenerationHyperparameters

_PREFILL_TOKENS = 32
"""Tokens at a prompt's end that hold what the template writes of the answer, such as ``<think>`` and a line break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One answer of the model, before it takes an API's form."""

    id: str
    message: dict[str, Any]
    """Assistant message in OpenAI's form: content, tool_calls, reasoning_content."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    stopped_by: str | None
    unparsable: bool
    """True if it has a tool call whose name or arguments cannot be parsed."""
    response: ModelResponse


class AnswerReader:
    def __init__(
        self, renderer: ChatRenderer, request: ChatRequest, prompt: list[int], gconfig: GenerationHyperparameters
    ) -> None:
        self._renderer = renderer
        self._request = request
        self._tools = request.tools if request.parse_tools else None
        self._skip_special_tokens = gconfig.skip_special_tokens
        self._stops = [*(gconfig.stop or []), *request.options.stop]
        self._parser = renderer.answer_parser if request.prompt is None else None
        self._prompt = prompt
        self._stream: TextStream | None = None

    @functools.cached_property
    def _prefill(self) -> str:
        """The end of the prompt, if it may have the beginning of the answer; under a grammar there is no reasoning."""
        is_read = self._parser and self._parser.reads_prefill and not self._request.grammar
        return self._renderer.decode(self._prompt[-_PREFILL_TOKENS:], skip_special_tokens=False) if is_read else ""

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        if self._tools and self._request.grammar:  # the answer is a call as bare JSON
            return []
        if self._stream is None:
            self._stream = self._new_stream()
        return self._stream.feed([token for token in ids if token not in self._renderer.stop_ids])

    def finish(self, answer: ChatAnswer) -> list[Piece]:
        """Return the text of the answer that was not sent."""
        message, stream = answer.message, self._stream or self._new_stream()
        return stream.finish(message["content"] or "", message.get("reasoning_content") or "")

    def read(self, response: ModelResponse, answer_id: str) -> ChatAnswer:
        text = self._decode(response.output_tokens, ended=True)
        stopped_by = min((stop for stop in self._stops if stop in text), key=text.index, default=None)
        if stopped_by is not None:
            text = text.partition(stopped_by)[0]
        parsed = ParsedAnswer(text)
        if self._parser is not None:
            bare_json = bool(self._request.grammar)
            parsed = self._parser.parse(text, self._tools, prefill=self._prefill, bare_json=bare_json)
        finish_reason: Any = "stop" if response.stop_reason in ("stop", "tool_calls") else "length"
        return ChatAnswer(
            id=answer_id,
            message=parsed.message(),
            finish_reason="tool_calls" if parsed.tool_calls else finish_reason,
            stopped_by=stopped_by,
            unparsable=parsed.unparsable,
            response=response,
        )

    def _new_stream(self) -> TextStream:
        parser = self._parser
        options = parser.stream_options(self._tools, self._prefill) if parser else {}
        return TextStream(self._decode, stops=self._stops, **options)

    def _decode(self, ids: list[int], *, ended: bool = False) -> str:
        skips, tools = self._skip_special_tokens, self._request.parse_tools
        return self._renderer.visible_text(ids, skip_special_tokens=skips, tools=tools, ended=ended)
