"""One output being generated: what was asked, what was sampled so far, and its reply in SGLang's form.

The model thread writes a ``GenerationRequest``, the event loop reads it; ``finish_reason`` is written last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_lite.embedded.sampling_params import SamplingParams

FinishReason = dict[str, Any]
Decode = Callable[[list[int], bool], str]


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

    def reply(self, decode: Decode, *, current_version: str, token_texts: bool) -> dict[str, Any]:
        """Return the reply in the form of SGLang's ``/generate``, with what is sampled so far.

        Args:
            decode: Ids and skip_special_tokens to text.
            current_version: Weight version to name when no token was sampled.
            token_texts: Whether to give the text of each token beside its log-prob.
        """
        finished = (
            self.finish_reason
        )  # read first, since it is written last: from here on nothing changes if set
        count = len(self.output_ids)
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": finished,
            "prompt_tokens": len(self.prompt),
            "weight_version": self.version_spans[-1][0] if self.version_spans else current_version,
            "num_retractions": self.num_retractions,
        }
        if self.return_logprob:

            def entry(logprob: float | None, token: int) -> list[Any]:
                return [logprob, token, decode([token], False) if token_texts else None]

            def entries(top: list[tuple[float, int]] | None) -> list[list[Any]] | None:
                return None if top is None else [entry(*one) for one in top]

            scored = self.prompt[self.logprob_start :] if self.input_logprobs else []
            meta["input_token_logprobs"] = list(map(entry, self.input_logprobs, scored))
            meta["output_token_logprobs"] = list(map(entry, self.output_logprobs[:count], self.output_ids))
            meta["output_token_logprobs_length"] = count
            if self.top_logprobs_num:
                meta["input_top_logprobs"] = [entries(top) for top in self.input_top_logprobs]
                meta["output_top_logprobs"] = [entries(top) for top in self.output_top_logprobs[:count]]
        meta |= {"reasoning_tokens": 0, "completion_tokens": count, "cached_tokens": self.cached_tokens}
        if finished is not None:
            meta["weight_versions"] = [
                {"version": version, "start": start, "end": end} for version, start, end in self.version_spans
            ]
            meta["e2e_latency"] = time.perf_counter() - self.arrived_at
        meta["cached_tokens_details"] = (
            {"device": self.cached_tokens, "host": 0} if self.cached_tokens else None
        )
        meta |= {"dp_rank": None, "response_sent_to_client_ts": time.time()}
        return {
            "text": self._text(decode, count, finished),
            "output_ids": self.output_ids[:count],
            "meta_info": meta,
        }

    def _text(self, decode: Decode, count: int, finished: FinishReason | None) -> str:
        """Return the text of the first ``count`` ids: without what stopped it, and without half a character."""
        matched = None if finished is None or self.params.no_stop_trim else finished.get("matched")
        ids = self.output_ids[: count - 1 if isinstance(matched, int) else count]
        text = decode(ids, self.params.skip_special_tokens)
        if finished is None:
            return text.rstrip("\ufffd")  # its other bytes are still to come
        return text[: text.index(matched)] if isinstance(matched, str) and matched in text else text
