"""Read an answer's ids as a message: whole, and as pieces of text while they are sampled. The ids stay as they are."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from areal_lite.agents.parsers.answer_parser import ParsedAnswer, TextRegions, text_before
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


@dataclass
class AnswerReader:
    """Reads one answer; with ``on_text``, calls it with each piece of text that is sure to be in the message."""

    renderer: ChatRenderer
    request: ChatRequest
    prompt: list[int]
    gconfig: GenerationHyperparameters
    on_text: Callable[[Piece], None] | None

    def __post_init__(self) -> None:
        self._tools = self.request.tools if self.request.parse_tools else None
        self._stops = [*(self.gconfig.stop or []), *(self.request.options.stop or [])]
        self._parser = None if self.request.prompts else self.renderer.answer_parser
        self._stream: TextStream | None = None
        if self.on_text is not None:
            regions = self._parser.regions(self._tools, self._prefill) if self._parser else None
            self._stream = TextStream(self._decode, self.on_text, stops=self._stops, regions=regions)

    @functools.cached_property
    def _prefill(self) -> str:
        """The end of the prompt, if it may have the beginning of the answer; under a grammar there is no reasoning."""
        is_read = self._parser and self._parser.reads_prefill and not self.request.grammar
        return self.renderer.decode(self.prompt[-_PREFILL_TOKENS:]) if is_read else ""

    def on_tokens(self, ids: Sequence[int], _: Sequence[float]) -> None:
        assert self._stream is not None
        if not (self._tools and self.request.grammar):  # the answer is a call as bare JSON
            self._stream.feed([token for token in ids if token not in self.renderer.stop_ids])

    def read(self, response: ModelResponse, answer_id: str) -> ChatAnswer:
        text = self._decode(response.output_tokens, ended=True)
        stopped_by = min((stop for stop in self._stops if stop in text), key=text.index, default=None)
        if stopped_by is not None:
            text = text.partition(stopped_by)[0]
        parsed = ParsedAnswer(text)
        if self._parser is not None:
            parsed = self._parser.parse(text, self._tools, prefill=self._prefill, bare_json=bool(self.request.grammar))
        if self._stream is not None:
            self._stream.finish(parsed.content, parsed.reasoning)
        finish_reason: Any = "stop" if response.stop_reason in ("stop", "tool_calls") else "length"
        return ChatAnswer(
            id=answer_id,
            message=parsed.message(),
            finish_reason="tool_calls" if parsed.tool_calls else finish_reason,
            stopped_by=stopped_by,
            unparsable=parsed.unparsable,
            response=response,
        )

    def _decode(self, ids: list[int], *, ended: bool = False) -> str:
        skips, tools = self.gconfig.skip_special_tokens, self.request.parse_tools
        return self.renderer.visible_text(ids, skip_special_tokens=skips, tools=tools, ended=ended)


@dataclass
class TextStream:
    """Sends the text of an answer while it is sampled, as far as the finished message will begin with it."""

    decode: Callable[[list[int]], str]
    send: Callable[[Piece], None]
    stops: Sequence[str] = ()
    regions: TextRegions | Regions | None = None

    def __post_init__(self) -> None:
        self.sent = self.reasoning = ""
        self._regions = self.regions or TextRegions()
        self._ids: list[int] = []
        self._context = 0
        """Ids before it are decoded for good; those from it to ``_decoded`` give the next ones their context."""
        self._decoded = 0
        self._waiting = ""
        self._closed = False

    def feed(self, ids: Sequence[int]) -> None:
        """Send the text that these ids make sure; often none."""
        self._ids.extend(ids)
        if self._closed:
            return
        before = self.decode(self._ids[self._context : self._decoded])
        text = self.decode(self._ids[self._context :])
        if len(text) <= len(before) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return  # the middle of a character
        self._context, self._decoded = self._decoded, len(self._ids)
        self._waiting += text[len(before) :]
        sure, self._closed = text_before(self._waiting, self.stops)
        self._waiting = self._waiting[len(sure) :]
        try:
            self._regions.feed(sure)
        except Exception:  # a call that cannot be read: the finished answer has its text
            self._closed = True
        self._closed |= self._regions.in_call
        self._send_rest(self._regions.content.rstrip(), self._regions.reasoning.rstrip())

    def finish(self, content: str, reasoning: str = "") -> None:
        """Send what is missing of the finished message's text."""
        self._closed = True
        if not content.startswith(self.sent):
            self.sent = self.sent.lstrip()
        self._send_rest(content, reasoning)

    def _send_rest(self, content: str, reasoning: str) -> None:
        if reasoning != self.reasoning and reasoning.startswith(self.reasoning):
            self.send(Piece(reasoning[len(self.reasoning) :], is_reasoning=True))
            self.reasoning = reasoning
        if content != self.sent and content.startswith(self.sent):
            self.send(Piece(content[len(self.sent) :]))
            self.sent = content
