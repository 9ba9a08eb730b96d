"""One output being generated: what was asked, what was sampled so far, and its reply in SGLang's form.

The model thread writes a ``GenerationRequest``, the event loop reads it; ``finish_reason`` is written last.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_lite.embedded.sampling_params import SamplingParams

FinishReason = dict[str, Any]


def aborted(message: str = "Aborted") -> FinishReason:
    """Return the finish reason of a request that somebody stopped."""
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}


@dataclass(kw_only=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt, one output."""

    rid: str
    """Unique among live requests; for ``n > 1`` the caller's rid with ``_0``, ``_1``, ... behind it."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    """64 bits that, with the position, decide every random choice of this output."""

    return_logprob: bool = False
    logprob_start: int | None = None
    """First prompt position whose log-probs are asked for; None for none."""

    top_logprobs_num: int = 0
    stream: bool = False

    output_ids: list[int] = field(default_factory=list)
    """Sampled ids, the stop token among them."""

    output_logprobs: list[float] = field(default_factory=list)
    """One per output id: log_softmax(logits / temperature), before any filter."""

    output_top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    input_top_logprobs: list[list[tuple[float, int]] | None] = field(default_factory=list)
    version_spans: list[list[Any]] = field(default_factory=list)
    """``[version, start, end]`` over the output ids, in order and without gaps."""

    cached_tokens: int = 0
    """Prompt tokens whose KV was copied instead of computed, at the first prefill."""

    num_retractions: int = 0
    finish_reason: FinishReason | None = None
    arrived_at: float = field(default_factory=time.perf_counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on the event loop when the request ended, or gained tokens while it streams."""

    prompt_array: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_array = np.asarray(self.prompt, dtype=np.int64)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output ids: what a prefill has to cover."""
        return self.prompt + self.output_ids

    @property
    def reserved_tokens(self) -> int:
        """Length this request may grow to."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def needs_scores(self) -> bool:
        """Whether the prompt's log-probs are asked for and not there yet."""
        return self.logprob_start is not None and not self.input_logprobs

    def append(self, token: int, logprob: float, version: str) -> None:
        """Record one sampled token and the weight version that wrote it."""
        if not self.version_spans or self.version_spans[-1][0] != version:
            self.version_spans.append([version, len(self.output_ids), len(self.output_ids)])
        self.version_spans[-1][2] += 1
        self.output_logprobs.append(logprob)
        self.output_ids.append(token)

    def visible_text(self, decoded: str, num_tokens: int) -> str:
        """Return what the caller sees of ``decoded``, the text of the first ``num_tokens`` output ids."""
        if num_tokens < len(self.output_ids) or self.finish_reason is None:
            return decoded.rstrip("\ufffd")  # half a character: its other bytes are still to come
        matched = self.finish_reason.get("matched")
        if isinstance(matched, str) and not self.params.no_stop_trim and matched in decoded:
            return decoded[: decoded.index(matched)]
        return decoded

    def ids_of_text(self, num_tokens: int) -> list[int]:
        """Return the ids to decode for the first ``num_tokens``: all but a stop token that is to be trimmed."""
        trim = (
            num_tokens == len(self.output_ids)
            and self.finish_reason is not None
            and isinstance(self.finish_reason.get("matched"), int)
            and not self.params.no_stop_trim
        )
        return self.output_ids[: num_tokens - 1 if trim else num_tokens]

    def reply(self, text: str, num_tokens: int, weight_version: str) -> dict[str, Any]:
        """Return the reply over the first ``num_tokens`` output ids in the form of SGLang's ``/generate``."""
        finished = self.finish_reason if num_tokens == len(self.output_ids) else None
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": finished,
            "prompt_tokens": len(self.prompt),
            "weight_version": weight_version,
            "num_retractions": self.num_retractions,
        }
        if self.return_logprob:
            start = len(self.prompt) if self.logprob_start is None else self.logprob_start
            meta["input_token_logprobs"] = [
                [logprob, token, None]
                for logprob, token in zip(self.input_logprobs, self.prompt[start:], strict=False)
            ]
            meta["output_token_logprobs"] = [
                [logprob, token, None]
                for logprob, token in zip(self.output_logprobs[:num_tokens], self.output_ids, strict=False)
            ]
            meta["output_token_logprobs_length"] = num_tokens
            if self.top_logprobs_num:
                meta["input_top_logprobs"] = [_with_null_text(top) for top in self.input_top_logprobs]
                meta["output_top_logprobs"] = [
                    _with_null_text(top) for top in self.output_top_logprobs[:num_tokens]
                ]
        meta |= {"reasoning_tokens": 0, "completion_tokens": num_tokens, "cached_tokens": self.cached_tokens}
        if finished is not None:
            meta["weight_versions"] = [
                {"version": version, "start": start, "end": end} for version, start, end in self.version_spans
            ]
        details = {"device": self.cached_tokens, "host": 0} if self.cached_tokens else None
        meta |= {"cached_tokens_details": details, "dp_rank": None}
        if finished is not None:
            meta["e2e_latency"] = time.perf_counter() - self.arrived_at
        meta["response_sent_to_client_ts"] = time.time()
        return {"text": text, "output_ids": self.output_ids[:num_tokens], "meta_info": meta}


def _with_null_text(top: list[tuple[float, int]] | None) -> list[list[Any]] | None:
    return None if top is None else [[logprob, token, None] for logprob, token in top]
