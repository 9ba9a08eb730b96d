"""The bytes of one streamed answer to its tokens. Pure: the engine client does the I/O.

Guarantees that the receiver gets each token of ``chunk()`` once, in order, as soon as its event is complete, however
the bytes are split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from areal_lite.servers.dialects import Dialect
from areal_lite.servers.dialects.dialect import (
    BadResponse,
    Chunk,
    GenerationCall,
    ServerLimits,
    StreamEvent,
    TopLogprobs,
)

Receiver = Callable[[Sequence[int], Sequence[float]], None]


class ReceiverError(Exception):
    """The receiver of tokens raised ``__cause__``; no fault of the server."""


class TokenStream:
    """Reads server-sent events and passes on their tokens."""

    def __init__(
        self, dialect: Dialect, call: GenerationCall, receive: Receiver, *, version: int, limits: ServerLimits
    ) -> None:
        self._dialect = dialect
        self._call = call
        self._receive = receive
        self._version = version
        self._limits = limits
        self._rest = b""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._top_logprobs: TopLogprobs = []
        self._finish: str | None = None
        self.reports_versions = True
        """The server reported the version of all tokens so far."""

    @property
    def finished(self) -> bool:
        return self._finish is not None

    def __len__(self) -> int:
        return len(self._tokens)

    def feed(self, data: bytes) -> None:
        """Take the next bytes, and pass on the tokens of the events that they complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not self.finished and (text := line[5:].strip()) != b"[DONE]":
                try:
                    parsed = orjson.loads(text)
                except orjson.JSONDecodeError as error:
                    raise BadResponse(f"an event that is not JSON ({error})") from None
                event = self._dialect.parse_event(parsed, len(self._tokens), top_logprobs=self._call.top_logprobs)
                if event is not None:
                    self._take(event)

    def _take(self, event: StreamEvent) -> None:
        versions = event.all_versions or ([] if event.version is None else [event.version])
        self._limits.check_reply(
            event.tokens, versions, len(self._tokens) + len(event.tokens), self._call.max_new_tokens
        )
        self._tokens += event.tokens
        self._logprobs += event.logprobs
        self._top_logprobs += event.top_logprobs
        if event.all_versions is not None:
            self._versions = event.all_versions
            self.reports_versions = True
        else:
            version = self._version if event.version is None else event.version
            self._versions += [version] * len(event.tokens)
            self.reports_versions = self.reports_versions and event.version is not None
        self._finish = event.finish
        if event.tokens:
            try:
                self._receive(event.tokens, event.logprobs)
            except Exception as error:
                raise ReceiverError from error

    def chunk(self) -> Chunk:
        """Return the tokens so far; an answer that did not finish is as good as aborted."""
        finish = self._finish or "abort"
        return Chunk(self._tokens, self._logprobs, self._versions, finish, self._top_logprobs)  # type: ignore[arg-type]
