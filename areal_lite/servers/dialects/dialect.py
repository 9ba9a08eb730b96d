"""The records that cross between the engine client and a dialect, and the checks that dialects share."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from areal_lite.api.image_span import Images
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.errors import ConfigError

T = TypeVar("T")
FINISHES = ("stop", "length", "abort")
MAX_VERSION = 10**9
FLOAT32_MAX = 3.4028234663852886e38
TopLogprobs = list[list[tuple[int, float]]]  # per token, ``(id, log-prob)``, best first


class BadResponse(Exception):
    """A reply that cannot be trusted: wrong shape, another's answer, log-probs that are not finite in float32."""


class ErrorReply(Exception):
    """An error that the server reports, with its HTTP status; a stream reports it in an event."""

    def __init__(self, status: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = 429 if status == 503 and "queue is full" in message else status  # SGLang's max_queued_requests
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Chunk:
    """The tokens of one reply, or those that one event adds to its stream; an aborted request takes several replies."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None  # per token, or of all tokens so far; None if the server does not report versions
    finish: Literal["stop", "length", "abort"] | None  # None if more tokens follow
    top_logprobs: TopLogprobs = field(default_factory=list)  # per token, or empty if the request did not ask for them
    repeated: list[int] = field(default_factory=list)  # last of the earlier tokens, which an event has before its own
    rid: str | None = None  # id of the request that it answers; None, like the next two, if the server does not tell it
    prompt_tokens: int | None = None
    model: str | None = None


@dataclass(slots=True, kw_only=True)
class GenerationCall:
    """One request for tokens, before a dialect words it."""

    input_ids: list[int]  # prompt, and the tokens of the answer sampled so far
    gconfig: GenerationHyperparameters
    rid: str
    max_new_tokens: int
    min_new_tokens: int = 0
    seed: int | None = None
    num_continued: int = 0  # how many of the last ``input_ids`` are tokens of the answer
    top_logprobs: int = 0
    stream: bool = False
    images: Images = ()  # images among ``input_ids``, which have all of their tokens
    pngs: Mapping[str, str] = field(default_factory=dict)  # the PNG of each image, in base64, by its sha256

    def data_urls(self) -> list[str]:
        """Return the images in order."""
        return [f"data:image/png;base64,{self.pngs[span.sha256]}" for span in self.images]

    @property
    def max_reply_bytes(self) -> int:
        """Bytes of the longest reply or event that is read: several times what servers send for so many tokens."""
        return 2**16 + self.max_new_tokens * (2**10 + 2**8 * self.top_logprobs)


@dataclass(slots=True)
class ServerLimits:
    """Limits on requests and replies, from what servers report; they change while answers run. None: unknown."""

    context_length: int | None = None
    vocab_size: int | None = None
    newest_version: int = 0  # newest policy version given to any server; before the first, the newest that one reports

    def narrow(self, info: "ServerInfo") -> None:
        self.context_length = min(filter(None, (self.context_length, info.context_length)), default=None)
        self.vocab_size = min(filter(None, (self.vocab_size, info.vocab_size)), default=None)

    def window(self, gconfig: GenerationHyperparameters) -> int:
        """Return how many tokens prompt and answer may have together."""
        return min(gconfig.max_tokens, self.context_length or gconfig.max_tokens)

    def check_reply(self, new: Chunk, call: GenerationCall, before: list[int], version: int) -> None:
        """Check the tokens that follow those ``before``; ``version`` is the client's own. Raises BadResponse."""
        tokens, num_tokens = new.tokens, len(before) + len(new.tokens)
        if new.rid is not None and new.rid != call.rid:
            raise BadResponse(f"the answer to another request, {new.rid!r:.80} instead of {call.rid!r}")
        if tokens and new.prompt_tokens is not None and new.prompt_tokens != len(call.input_ids):
            raise BadResponse(f"an answer to {new.prompt_tokens!r:.80} prompt tokens instead of {len(call.input_ids)}")
        if new.repeated and new.repeated != before[-len(new.repeated) :]:
            raise BadResponse("a stream that changes its earlier tokens")
        if num_tokens > call.max_new_tokens:
            raise BadResponse(f"{num_tokens} tokens for a request of at most {call.max_new_tokens}")
        if new.versions and (newest := max(new.versions)) > max(version, self.newest_version):
            raise BadResponse(f"tokens of version {newest}, but the newest is {max(version, self.newest_version)}")
        if self.vocab_size and max(tokens, default=0) >= self.vocab_size:
            raise BadResponse(f"token {max(tokens)}, which is not in the vocabulary [0, {self.vocab_size})")


@dataclass(frozen=True, slots=True)
class ControlCall:
    path: str
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts that a server reports about itself; None if unreported."""

    context_length: int | None = None
    vocab_size: int | None = None
    model: str | None = None  # its folder, or its name on the hub
    version: int | None = None  # version of its weights; 0 before the first update
    paused: bool | None = None
    device: str | None = None
    num_ranks: int | None = None  # processes that hold a part of the model
    name: str | None = None  # the model's name in its replies, except those of an adapter
    release: str | None = None  # version of the server's program


def shared_sampling(gconfig: GenerationHyperparameters) -> dict[str, Any]:
    """Return the sampling parameters that both protocols name alike; those that are off are left out."""
    temperature = gconfig.effective_temperature
    sampling: dict[str, Any] = {"temperature": temperature, "skip_special_tokens": gconfig.skip_special_tokens}
    for name in ("stop", "stop_token_ids", "ignore_eos", "frequency_penalty", "presence_penalty"):
        if value := getattr(gconfig, name):
            sampling[name] = value
    if gconfig.repetition_penalty != 1:
        sampling["repetition_penalty"] = gconfig.repetition_penalty
    if gconfig.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in gconfig.logit_bias.items()}
    return sampling


def with_extra(sampling: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    if clash := sorted(extra.keys() & {*sampling, "n"}):
        raise ConfigError(
            f"gconfig.extra sets {clash[0]!r}, which the engine sets itself: remove it from extra and use gconfig's "
            "own field"
        )
    return sampling | extra


def check_tokens(
    tokens: list[int], logprobs: list[float], top_logprobs: TopLogprobs | None, finish: str | None
) -> None:
    """Check lengths, token ids, log-probs and the reason of the end, if it is reached; raises BadResponse."""
    if finish is not None and finish not in FINISHES:
        raise BadResponse(f"the unknown finish reason {finish!r}")
    if len(tokens) != len(logprobs):
        raise BadResponse(f"{len(tokens)} tokens, {len(logprobs)} log-probs")
    _check_pairs(tokens, logprobs)
    if top_logprobs is not None:
        if len(top_logprobs) != len(tokens):
            raise BadResponse(f"{len(tokens)} tokens, {len(top_logprobs)} lists of top log-probs")
        pairs = [pair for top in top_logprobs for pair in top]
        _check_pairs([token for token, _ in pairs], [logprob for _, logprob in pairs])


def _check_pairs(tokens: list[int], logprobs: list[float]) -> None:
    if tokens:
        if set(map(type, tokens)) != {int} or min(tokens) < 0:
            raise BadResponse("token ids that are not whole numbers from 0")
        if not set(map(type, logprobs)) <= {float, int}:
            raise BadResponse("log-probs that are not numbers")
        total = sum(logprobs)
        overflows = total < -FLOAT32_MAX and min(logprobs) < -FLOAT32_MAX  # finite here, but not where they are trained
        if total - total != 0.0 or overflows or max(logprobs) > 1e-3:
            raise BadResponse("log-probs that are not finite numbers up to 0")


def checked_scores(pairs: Sequence[tuple[int, float | None]], input_ids: list[int]) -> list[float]:
    """Return the log-probs of ``input_ids`` after the first, from all their ``(id, log-prob)``; raises BadResponse."""
    if [token for token, _ in pairs] != input_ids:
        raise BadResponse(f"log-probs of {len(pairs)} tokens, which are not the {len(input_ids)} that were sent")
    scores: list[Any] = [logprob for _, logprob in pairs[1:]]
    _check_pairs(input_ids[1:], scores)
    return scores


@contextmanager
def reading(reply: Any, what: str) -> Iterator[None]:
    """Raise ErrorReply if a reply or event is ``{"error": {message, code}}``, BadResponse if it has no ``what``."""
    error = reply.get("error") if isinstance(reply, dict) else None
    if error:
        code = error.get("code") if isinstance(error, dict) else None
        message = error.get("message", error) if isinstance(error, dict) else error
        raise ErrorReply(code if type(code) is int else 500, str(message))
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadResponse(f"a reply without {what} ({error!r})") from None


def update_error(reply: Any) -> str | None:
    """Return why a reply with status 200 is a failed update, by vLLM's first worker that failed; else None."""
    if isinstance(reply, dict):
        for result in reply.get("results") or [reply]:
            if isinstance(result, dict) and result.get("success") is False:
                return str(result.get("message"))
    return None


def reported(reply: dict[str, Any], name: str, kind: type[T]) -> T | None:
    """Return a fact that a server reports about itself; None if it is missing or of another type."""
    value = reply.get(name)
    return value if isinstance(value, kind) else None


def version_number(label: Any) -> int:
    """Return a server's version label as a policy version; ``default`` is 0; raises BadResponse."""
    if label == "default":
        return 0
    version = int(label) if isinstance(label, str) and label.isdecimal() and len(label) < 10 else label
    if type(version) is not int or not 0 <= version < MAX_VERSION:
        raise BadResponse(
            f"the weight version {label!r:.80}: it must be a number, whole and from 0 to {MAX_VERSION - 1}"
        )
    return version


def version_or_none(label: Any) -> int | None:
    """Return a version label as a policy version; None if it is missing or not a number."""
    try:
        return None if label is None else version_number(label)
    except BadResponse:
        return None


def spans_to_versions(spans: Any, length: int) -> list[int]:
    """Return the version of each of ``length`` tokens from ``[{version, start, end}, ...]``."""
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] > length:
            raise BadResponse(f"version spans with a gap or no end from token {len(versions)} of {length} on")
        versions.extend([version_number(span["version"])] * (span["end"] - span["start"]))
    if len(versions) != length:
        raise BadResponse(f"version spans over {len(versions)} of {length} tokens")
    return versions
