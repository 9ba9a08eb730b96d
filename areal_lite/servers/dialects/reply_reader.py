"""One reply to its tokens, whole or as the bytes of a stream. Pure: the engine client does the I/O.

Guarantees each token of ``chunk()`` once, in order, as soon as its event is complete, however the bytes are split.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import orjson
from areal_lite.servers.dialects import Dialect
from areal_lite.servers.dialects.dialect import BadResponse, Chunk, GenerationCall, ServerLimits, TopLogprobs

Receiver = Callable[[Sequence[int], Sequence[float]], None]


class ReceiverError(Exception):
    """The receiver of tokens raised ``__cause__``; no fault of the server."""


@dataclass
class ReplyReader:
    """Reads the reply to ``call``; ``version`` labels tokens whose version the server does not report."""

    dialect: Dialect
    call: GenerationCall
    receive: Receiver | None
    version: int
    limits: ServerLimits

    def __post_init__(self) -> None:
        self._rest = b""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._top_logprobs: TopLogprobs = []
        self.finish: str | None = None  # None while more is to come
        self.model: str | None = None  # name of the model that answers, if the reply tells it
        self.reports_versions = True  # the server reported the version of all tokens so far

    def __len__(self) -> int:
        return len(self._tokens)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of a stream of server-sent events, and pass on the tokens of those they complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self.call.max_reply_bytes:
            raise BadResponse(f"an event of more than {self.call.max_reply_bytes} bytes")
        for line in lines:
            if line.startswith(b"data:") and self.finish is None and (text := line[5:].strip()) != b"[DONE]":
                self.take(text)

    def take(self, text: bytes) -> None:
        """Take a whole reply, or one event of a stream; raises BadResponse and ErrorReply."""
        try:
            reply = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise BadResponse(f"a reply that is not JSON ({error})") from None
        new = self.dialect.parse(reply, len(self), top_logprobs=self.call.top_logprobs)
        if new is None:
            return
        self.limits.check_reply(new, self.call, self._tokens, self.version)
        self.model = new.model
        count = len(self) + len(new.tokens)
        self._tokens += new.tokens
        self._logprobs += new.logprobs
        self._top_logprobs += new.top_logprobs
        versions = new.versions
        if versions is None:
            versions = [self.version] * len(new.tokens)
            self.reports_versions = self.reports_versions and not new.tokens
        elif len(versions) == count:
            self.reports_versions = True
        self._versions[count - len(versions) :] = versions  # of all tokens, they correct what was assumed before
        self.finish = new.finish
        if new.tokens and self.receive is not None:
            try:
                self.receive(new.tokens, new.logprobs)
            except Exception as error:
                raise ReceiverError from error

    def whole(self) -> Chunk:
        """Return the tokens of a reply that is complete; raises BadResponse."""
        if self.finish is None:
            raise BadResponse("an answer that ends without a finish reason")
        if not self._tokens and self.finish != "abort":  # an answer that ends at once has its end token
            raise BadResponse(f"no tokens, with the finish reason {self.finish!r}")
        return self.chunk()

    def chunk(self) -> Chunk:
        """Return the tokens so far; an answer that did not finish is as good as aborted."""
        return Chunk(self._tokens, self._logprobs, self._versions, self.finish or "abort", self._top_logprobs)  # type: ignore[arg-type]
