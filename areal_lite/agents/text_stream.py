"""The text of an answer while it is being sampled: what can be sent, and what has to wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]


class TextStream:
    """Turns ids into the pieces of text that the finished message will begin with.

    Text waits while a character or a stop string is incomplete, and from an opening on (of a tool call, say)
    until the answer is complete and parsed. White space at the end waits for what follows.

    Args:
        decode: Returns the text of ids.
        stops: Strings that end the answer, and are not part of it.
        openings: Strings that begin something other than text.
    """

    def __init__(self, decode: Decode, *, stops: Sequence[str] = (), openings: Sequence[str] = ()) -> None:
        self.sent = ""
        """The pieces so far."""
        self._decode = decode
        self._ends = [*stops, *openings]
        self._longest = max(map(len, self._ends), default=0)
        self._ids: list[int] = []
        self._context = 0
        """Ids before it are decoded for good; those from it to ``_decoded`` give the next ones their context."""
        self._decoded = 0
        self._waiting = ""
        self._closed = False

    def wait(self) -> None:
        """Send nothing before the answer is complete."""
        self._closed = True

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that can be sent after these ids; often empty."""
        self._ids.extend(ids)
        if self._closed:
            return ""
        before = self._decode(self._ids[self._context : self._decoded])
        text = self._decode(self._ids[self._context :])
        if len(text) <= len(before) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""  # the middle of a character
        self._context, self._decoded = self._decoded, len(self._ids)
        self._waiting += text[len(before) :]
        return self._send(self._sendable())

    def finish(self, content: str) -> str:
        """Return what is missing of the finished message's text."""
        self._closed = True
        for sent in (self.sent, self.sent.lstrip()):
            if content.startswith(sent):
                return self._send(len(content) - len(sent), content[len(sent) :])
        return ""

    def _sendable(self) -> int:
        """Return how many characters of the waiting text are sure to be in the message."""
        text = self._waiting
        found = [at for end in self._ends if (at := text.find(end)) >= 0]
        if found:
            self._closed = True
            return len(text[: min(found)].rstrip())
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(end.startswith(text[at:]) for end in self._ends):
                return len(text[:at].rstrip())
        return len(text.rstrip())

    def _send(self, count: int, text: str | None = None) -> str:
        piece = (self._waiting if text is None else text)[:count]
        self._waiting = self._waiting[count:]
        self.sent += piece
        return piece
