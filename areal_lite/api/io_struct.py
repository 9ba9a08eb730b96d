"""Requests to an inference engine and its responses, token by token."""

from __future__ import annotations
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any
from areal_lite.api.image_span import Images

if TYPE_CHECKING:
    from areal_lite.config.generation import GenerationHyperparameters

_rids = random.Random()  # its own, seeded by the system: a user's seed must not repeat the ids of another run
os.register_at_fork(after_in_child=_rids.seed)


def _default_gconfig() -> GenerationHyperparameters:
    from areal_lite.config.generation import GenerationHyperparameters  # pydantic, which the dump writer does not load

    return GenerationHyperparameters()


@dataclass(slots=True, eq=False)
class TokenPrefix:
    """The first ``length`` ids of a list that only grows: the turns of a conversation share one list."""

    ids: list[int]
    length: int
    num_accepted: int = 0
    """Ids at the beginning that were the prompt of an earlier call: the engine does not check them again."""

    def tolist(self) -> list[int]:
        """Return the ids as a new list."""
        return self.ids[: self.length]

    def extended(self, more: list[int]) -> TokenPrefix:
        """Return these ids followed by ``more``; they are copied only if other ids follow them already."""
        ids, end = self.ids, self.length + len(more)
        if ids[self.length : end] != more:
            if len(ids) > self.length:
                ids = self.tolist()
            ids += more
        return TokenPrefix(ids, end, self.length)


@dataclass(slots=True, kw_only=True)
class ModelRequest:
    """One call of the model; only ``input_ids`` is required."""

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=_default_gconfig)
    # SGLang aborts by prefix of the rid, so ids must all have one length.
    rid: str = field(default_factory=lambda: f"{_rids.getrandbits(128):032x}")
    metadata: dict[str, Any] = field(default_factory=dict)
    """Passed on to the response; ``agent`` names the agent that calls (``Turn.agent``)."""
    tokenizer: Any = None
    on_tokens: Callable[[Sequence[int], Sequence[float]], None] | None = None
    """Called on the engine's event loop with new ids and their log-probs as the server sends them, each once and in
    order. An exception it raises ends the request. None asks for the whole answer at once, which costs less."""
    top_logprobs: int = 0
    """Number of most likely tokens to report at each position."""
    prefix: TokenPrefix | None = None
    """The ids of ``input_ids``, which then do not change: records of the call share it instead of copying the ids."""
    images: Images = ()
    """Images among ``input_ids``, which hold all of their tokens; the run's folder has the files."""
    image_data: list[str] | None = None
    """AReaL's: the images in base64, which the engine stores; ``images`` are then found by their tokens, in order."""
    vision_msg_vllm: Any = None
    """AReaL's, ignored: every server gets the tokens."""
    processor: Any = None
    """AReaL's, ignored."""

    def copy(self) -> ModelRequest:
        """Return a copy with its own ``input_ids`` and ``metadata``."""
        return replace(self, input_ids=list(self.input_ids), metadata=dict(self.metadata), prefix=None)


@dataclass(slots=True, kw_only=True)
class ModelResponse:
    """The engine's answer as the server returned it: ``output_tokens``, ``output_logprobs`` (nats) and
    ``output_versions`` have the same length; a sampled stop token is their last entry."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    output_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Per output token, the most likely ``(id, log-prob)``, best first; empty unless the request asked for them."""
    stop_reason: str = "stop"
    latency: float = 0.0
    """Seconds from the first request sent to the last answer."""
    ttft: float = 0.0
    """Seconds to the first token of a streamed answer, else to the first reply."""
    started: float = 0.0
    """Wall clock at the first request, seconds since the epoch."""
    attempts: int = 1
    """HTTP requests it took, retries and continuations after an abort included."""
    rid: str = ""
    server: str = ""
    """URL of the server that gave the last tokens, a router's in front of it; empty if unknown."""
    tokenizer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    images: Images = ()
    """Images among ``input_tokens``."""

    @property
    def prompt(self) -> TokenPrefix:
        """The prompt's ids, not copied."""
        return TokenPrefix(self.input_tokens, len(self.input_tokens))

    @property
    def input_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Sampled tokens, a stop token included."""
        return len(self.output_tokens)

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """The sampled ids without the end or pad token that ended the answer; ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("output_tokens_without_stop needs a tokenizer: give ModelRequest(tokenizer=...)")
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
        if self.stop_reason == "stop" and self.output_tokens and self.output_tokens[-1] in ends:
            return self.output_tokens[:-1]
        return self.output_tokens


class SharedPromptResponse(ModelResponse):
    """A response that shares its prompt with others; each access to ``input_tokens`` makes a new list."""

    __slots__ = ("_prompt",)
    _prompt: TokenPrefix

    @classmethod
    def of(cls, response: ModelResponse, prompt: TokenPrefix) -> SharedPromptResponse:
        shared = cls.__new__(cls)
        shared._prompt = prompt
        for name in _OWN_FIELDS:
            setattr(shared, name, getattr(response, name))
        return shared

    @property
    def input_tokens(self) -> list[int]:
        return self._prompt.tolist()

    @input_tokens.setter
    def input_tokens(self, ids: list[int]) -> None:
        self._prompt = TokenPrefix(ids, len(ids))

    @property
    def prompt(self) -> TokenPrefix:
        return self._prompt

    @property
    def input_len(self) -> int:
        return self._prompt.length


_OWN_FIELDS = [column.name for column in fields(ModelResponse) if column.name != "input_tokens"]
