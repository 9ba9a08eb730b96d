"""Split an answer that is being sampled into the text that can be sent and the text that has to wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from areal_lite.agents.parsers.answer_parser import THINK, THINK_END
from areal_lite.agents.parsers.response_template import Regions


class Piece(NamedTuple):
    """The next piece of an answer's text."""

    text: str
    is_reasoning: bool = False


class TextStream:
    """Turns ids into the pieces of text that the finished message will begin with."""

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
