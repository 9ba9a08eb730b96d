"""The interface of a server's protocol to the engine client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from areal_lite.api.generation import GenerationHyperparameters


class BadResponse(Exception):
    """A reply that cannot be trusted: wrong shape, lengths that differ, log-probs that are not finite."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one reply; a request takes several if it is aborted and continued."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None
    """Per token; None if the server does not report versions."""
    finish: Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class ControlCall:
    """One request of the control plane."""

    path: str
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server reports about itself; None if unreported."""

    context_length: int | None = None
    vocab_size: int | None = None


class Dialect(Protocol):
    """One backend's wire protocol, without any I/O."""

    generate_path: str
    info_path: str

    def generate_body(
        self,
        input_ids: list[int],
        gconfig: GenerationHyperparameters,
        *,
        rid: str,
        max_new_tokens: int,
        min_new_tokens: int,
        seed: int | None,
    ) -> dict[str, Any]:
        """Return the JSON body of one generation."""

    def parse_generate(self, reply: Any) -> Chunk:
        """Return the tokens of a reply; raises BadResponse."""

    def parse_info(self, reply: Any) -> ServerInfo:
        """Parse the reply of ``info_path``; never raises."""

    def abort(self, rid: str) -> ControlCall:
        """Return the call that aborts one running request, which returns its tokens so far."""

    def pause(self) -> ControlCall:
        """Return the call that aborts running requests, which return their tokens so far."""

    def update_weights(self, path: str, version: int) -> list[ControlCall]:
        """Return the calls that load the checkpoint folder at ``path`` as ``version``."""

    def resume(self) -> ControlCall:
        """Return the call that ends :meth:`pause`."""

    def update_error(self, reply: Any) -> str | None:
        """Return why a reply with status 200 is a failed update, or None."""


def checked_chunk(tokens: list[int], logprobs: list[float], versions: list[int] | None, finish: str) -> Chunk:
    """Check lengths, token ids and log-probs, and return them as a chunk.

    Raises:
        BadResponse: If a check fails.
    """
    if len(tokens) != len(logprobs) or (versions is not None and len(versions) != len(tokens)):
        raise BadResponse(
            f"{len(tokens)} tokens, {len(logprobs)} log-probs, {versions and len(versions)} versions"
        )
    if tokens:
        if set(map(type, tokens)) != {int} or min(tokens) < 0:
            raise BadResponse("token ids that are not whole numbers from 0")
        if not set(map(type, logprobs)) <= {float, int}:
            raise BadResponse("log-probs that are not numbers")
        total = sum(logprobs)
        if total - total != 0.0 or max(logprobs) > 1e-3:
            raise BadResponse("log-probs that are not finite numbers up to 0")
    if finish not in ("stop", "length", "abort"):
        raise BadResponse(f"the unknown finish reason {finish!r}")
    return Chunk(tokens, logprobs, versions, finish)  # type: ignore[arg-type]


def version_number(label: Any) -> int:
    """Return a server's version label as a policy version; ``default`` is 0.

    Raises:
        BadResponse: If it is neither a number nor ``default``.
    """
    if label == "default":
        return 0
    try:
        return int(label)
    except (TypeError, ValueError):
        raise BadResponse(f"the weight version {label!r}: it must be a number") from None


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
