"""Read an answer's ids as a message: whole, and as pieces of text while they are sampled. The ids stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from areal_lite.agents.parsers.answer_parser import THINK, THINK_END, ParsedAnswer
from areal_lite.agents.parsers.response_template import Regions
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_request import ChatRequest
from areal_lite.api.io_struct import ModelResponse
from areal_lite.config.generation import GenerationHyperparameters

_PREFILL_TOKENS = 32
"""Tokens at a prompt's end that hold what the template writes of the answer, such as ``<think>`` and a line break."""


class Piece(NamedTuple):
    """The next piece of an answer's text."""

    text: str
    is_reasoning: bool = False


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
    """Reads one answer; with ``on_text``, calls it with each piece of text that is sure to be in the message."""

    def __init__(
        self,
        renderer: ChatRenderer,
        request: ChatRequest,
        prompt: list[int],
        gconfig: GenerationHyperparameters,
        on_text: Callable[[Piece], None] | None,
    ) -> None:
        self._renderer = renderer
        self._request = request
        self._tools = request.tools if request.parse_tools else None
        self._skip_special_tokens = gconfig.skip_special_tokens
        self._stops = [*(gconfig.stop or []), *(request.options.stop or [])]
        self._parser = renderer.answer_parser if request.prompt is None else None
        self._prompt = prompt
        self._on_text = on_text
        self._stream: TextStream | None = None
        if on_text is not None:
            options = self._parser.stream_options(self._tools, self._prefill) if self._parser else {}
            self._stream = TextStream(self._decode, stops=self._stops, **options)

    @functools.cached_property
    def _prefill(self) -> str:
        """The end of the prompt, if it may have the beginning of the answer; under a grammar there is no reasoning."""
        is_read = self._parser and self._parser.reads_prefill and not self._request.grammar
        return self._renderer.decode(self._prompt[-_PREFILL_TOKENS:], skip_special_tokens=False) if is_read else ""

    def on_tokens(self, ids: Sequence[int], _: Sequence[float]) -> None:
        assert self._stream is not None
        if not (self._tools and self._request.grammar):  # the answer is a call as bare JSON
            self._send(self._stream.feed([token for token in ids if token not in self._renderer.stop_ids]))

    def read(self, response: ModelResponse, answer_id: str) -> ChatAnswer:
        text = self._decode(response.output_tokens, ended=True)
        stopped_by = min((stop for stop in self._stops if stop in text), key=text.index, default=None)
        if stopped_by is not None:
            text = text.partition(stopped_by)[0]
        parsed = ParsedAnswer(text)
        if self._parser is not None:
            bare_json = bool(self._request.grammar)
            parsed = self._parser.parse(text, self._tools, prefill=self._prefill, bare_json=bare_json)
        if self._stream is not None:
            self._send(self._stream.finish(parsed.content, parsed.reasoning))
        finish_reason: Any = "stop" if response.stop_reason in ("stop", "tool_calls") else "length"
        return ChatAnswer(
            id=answer_id,
            message=parsed.message(),
            finish_reason="tool_calls" if parsed.tool_calls else finish_reason,
            stopped_by=stopped_by,
            unparsable=parsed.unparsable,
            response=response,
        )

    def _send(self, pieces: list[Piece]) -> None:
        assert self._on_text is not None
        for piece in pieces:
            self._on_text(piece)

    def _decode(self, ids: list[int], *, ended: bool = False) -> str:
        skips, tools = self._skip_special_tokens, self._request.parse_tools
        return self._renderer.visible_text(ids, skip_special_tokens=skips, tools=tools, ended=ended)


class TextStream:
    """Splits an answer that is being sampled into text that can be sent and text that has to wait.

    The finished message will begin with what was sent.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        stops: Sequence[str] = (),
        openings: Sequence[str] = (),
        json_waits: bool = False,
        thinking: bool | None = None,
        regions: Regions | None = None,
    ) -> None:
        self.sent = ""
        self.reasoning = ""
        self._decode = decode
        self._ends = [*stops, *openings]
        self._ids: list[int] = []
        self._context = 0
        """Ids before it are decoded for good; those from it to ``_decoded`` give the next ones their context."""
        self._decoded = 0
        self._waiting = ""
        self._closed = False
        self._json_waits = json_waits
        self._thinking = thinking
        self._in_reasoning = False
        self._regions = regions

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """Return the text that can be sent after these ids; often nothing."""
        self._ids.extend(ids)
        if self._closed:
            return []
        before = self._decode(self._ids[self._context : self._decoded])
        text = self._decode(self._ids[self._context :])
        if len(text) <= len(before) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return []  # the middle of a character
        self._context, self._decoded = self._decoded, len(self._ids)
        self._waiting += text[len(before) :]
        if self._regions is not None:
            return self._feed_regions(self._regions)
        pieces = self._feed_reasoning() if self._thinking is not None else []
        if self._thinking is None:
            if self._json_waits and not self.sent and self._waiting.lstrip()[:1] in ("{", "["):
                self._closed = True
            else:
                pieces += self._send(self._sendable(self._ends))
        return pieces

    def finish(self, content: str, reasoning: str = "") -> list[Piece]:
        """Return what is missing of the finished message's text."""
        self._closed = True
        pieces = []
        if reasoning.startswith(self.reasoning):
            pieces = self._piece(reasoning[len(self.reasoning) :], is_reasoning=True)
        for sent in (self.sent, self.sent.lstrip()):
            if content.startswith(sent):
                return pieces + self._piece(content[len(sent) :])
        return pieces

    def _feed_regions(self, regions: Regions) -> list[Piece]:
        count = self._sendable(self._ends)
        text, self._waiting = self._waiting[:count], self._waiting[count:]
        try:
            regions.feed(text)
        except Exception:  # a call that cannot be read: the finished answer has its text
            self._closed = True
        self._closed |= regions.in_call
        reasoning = regions.reasoning.strip()[len(self.reasoning) :]
        content = regions.content.strip()[len(self.sent) :]
        return self._piece(reasoning, is_reasoning=True) + self._piece(content)

    def _feed_reasoning(self) -> list[Piece]:
        """Move reasoning out of the waiting text, up to where the content begins."""
        if not self._in_reasoning:
            text = self._waiting.lstrip()
            if len(text) < len(THINK) and THINK.startswith(text):
                return []
            if not self._thinking and not text.startswith(THINK):
                self._thinking = None
                return []
            self._waiting, self._in_reasoning = text.removeprefix(THINK), True
        if not self.reasoning:
            self._waiting = self._waiting.lstrip()
        reasoning, end, content = self._waiting.partition(THINK_END)
        if not end:
            return self._send(self._sendable((THINK_END,)), is_reasoning=True)
        if not content.lstrip():  # white space between reasoning and content is in neither
            rest = reasoning.rstrip()
            self._waiting = self._waiting[len(rest) :]
            return self._piece(rest, is_reasoning=True)
        self._waiting, self._thinking = content.lstrip(), None
        return self._piece(reasoning.rstrip(), is_reasoning=True)

    def _sendable(self, ends: Sequence[str]) -> int:
        """Return how many characters of the waiting text are sure to be in the message."""
        text = self._waiting
        found = [at for end in ends if (at := text.find(end)) >= 0]
        if found:
            self._closed = True
            return len(text[: min(found)].rstrip())
        longest = max(map(len, ends), default=0)
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if any(end.startswith(text[at:]) for end in ends):
                return len(text[:at].rstrip())
        return len(text.rstrip())

    def _send(self, count: int, *, is_reasoning: bool = False) -> list[Piece]:
        text, self._waiting = self._waiting[:count], self._waiting[count:]
        return self._piece(text, is_reasoning=is_reasoning)

    def _piece(self, text: str, *, is_reasoning: bool = False) -> list[Piece]:
        if is_reasoning:
            self.reasoning += text
        else:
            self.sent += text
        return [Piece(text, is_reasoning)] if text else []
