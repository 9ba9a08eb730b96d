"""One output being generated: its request, the tokens so far, and its reply in SGLang's format.

The model thread writes a ``GenerationRequest`` and the event loop reads it; ``finish_reason`` is written last.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
import numpy as np
import numpy.typing as npt
from areal_lite.embedded.decoder.image_prompt import ImagePrompt
from areal_lite.embedded.grammar import Grammar
from areal_lite.embedded.sampling_params import SamplingParams

FinishReason = dict[str, Any]
Decode = Callable[[list[int], bool], str]  # ids, skip_special_tokens -> text


def aborted(message: str = "Aborted", *, status: int | None = None, kind: str | None = None) -> FinishReason:
    """Return the finish reason of an aborted request, with ``status`` and ``kind`` of an error of HTTP."""
    return {"type": "abort", "message": message, "status_code": status, "err_type": kind}


@dataclass(kw_only=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt, one output."""

    rid: str  # unique among live requests
    prompt: list[int]
    params: SamplingParams
    seed: int  # 64 bits. Seed and position decide every random choice of this output.
    return_logprob: bool = False
    top_logprobs_num: int = 0
    stream: bool = False
    incremental: bool = False  # events of a stream hold new tokens only
    num_continued: int = 0  # prompt ids at the end that an earlier request sampled and this one continues
    grammar: Grammar | None = None  # constraint of the output, after ``num_continued`` ids
    images: ImagePrompt | None = None  # images of the prompt
    output_ids: list[int] = field(default_factory=list)  # sampled ids, including the stop token
    output_logprobs: list[float] = field(default_factory=list)  # log_softmax(logits / temperature), unfiltered
    output_top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    version_spans: list[list[Any]] = field(default_factory=list)
    """``[version, start, end]`` ranges of the output ids, in order and without gaps."""
    cached_tokens: int = 0  # prompt tokens whose KV the first prefill copied instead of computing
    num_retractions: int = 0
    finish_reason: FinishReason | None = None
    arrived_at: float = field(default_factory=time.perf_counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set at the end and, if it streams, at new tokens
    prompt_array: npt.NDArray[np.int64] = field(init=False)
    """The prompt's ids; those of images as :func:`~areal_lite.api.image_span.keyed_ids`."""

    def __post_init__(self) -> None:
        self.prompt_array = np.asarray(self.prompt if self.images is None else self.images.keys, dtype=np.int64)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output ids, all of which a prefill must compute."""
        return self.prompt + self.output_ids

    @property
    def keys(self) -> list[int]:
        """The tokens; those of images are numbers of their own, so equal keys have equal KV."""
        return self.tokens if self.images is None else self.images.keys + self.output_ids

    @property
    def written_ids(self) -> list[int]:
        """The ids sampled so far, those of the continued request included."""
        return self.prompt[len(self.prompt) - self.num_continued :] + self.output_ids

    @property
    def reserved_tokens(self) -> int:
        """Maximum length of prompt and output."""
        return len(self.prompt) + self.params.max_new_tokens

    def append(self, token: int, logprob: float, version: str) -> None:
        """Record one sampled token and the version of the weights that computed it."""
        if not self.version_spans or self.version_spans[-1][0] != version:
            self.version_spans.append([version, len(self.output_ids), len(self.output_ids)])
        self.version_spans[-1][2] += 1
        self.output_logprobs.append(logprob)
        self.output_ids.append(token)

    def reply(self, decode: Decode, *, current_version: str) -> dict[str, Any]:
        """Return the tokens so far as SGLang's ``/generate`` does; without any, the version is ``current_version``."""
        # Read first because it is written last: once it is set, nothing else changes.
        finished = self.finish_reason
        count = len(self.output_ids)
        meta = self._meta(0, count, finished) | {
            "weight_version": self.version_spans[-1][0] if self.version_spans else current_version,
            "num_retractions": self.num_retractions,
            "reasoning_tokens": 0,
            "cached_tokens_details": {"device": self.cached_tokens, "host": 0} if self.cached_tokens else None,
            "dp_rank": None,
            "response_sent_to_client_ts": time.time(),
        }
        if self.return_logprob:
            meta |= {"input_token_logprobs": [], "output_token_logprobs_length": count}
            if self.top_logprobs_num:
                meta["input_top_logprobs"] = []
        if finished is not None:
            meta |= {"weight_versions": self._versions(count), "e2e_latency": time.perf_counter() - self.arrived_at}
        return {"text": self._text(decode, count, finished), "output_ids": self.output_ids[:count], "meta_info": meta}

    def new_part(self, start: int) -> dict[str, Any]:
        """Return the output from token ``start`` on, as an event of a stream without repetitions and text."""
        finished = self.finish_reason  # read first, as in ``reply``
        count = len(self.output_ids)
        meta = self._meta(start, count, finished) | {"weight_versions": self._versions(count)}
        return {"output_ids": self.output_ids[start:count], "meta_info": meta}

    def _meta(self, start: int, end: int, finished: FinishReason | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": finished,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": end,
            "cached_tokens": self.cached_tokens,
        }
        if self.return_logprob:
            pairs = zip(self.output_logprobs[start:end], self.output_ids[start:end], strict=True)
            meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
            if self.top_logprobs_num:
                tops = self.output_top_logprobs[start:end]
                meta["output_top_logprobs"] = [[(logprob, token, None) for logprob, token in top] for top in tops]
        return meta

    def _versions(self, count: int) -> list[dict[str, Any]]:
        return [
            {"version": version, "start": start, "end": min(end, count)}
            for version, start, end in self.version_spans
            if start < count
        ]

    def _text(self, decode: Decode, count: int, finished: FinishReason | None) -> str:
        """Return the text of the first ``count`` ids, without the stop text and without incomplete characters."""
        matched = None if finished is None or self.params.no_stop_trim else finished.get("matched")
        ids = self.output_ids[: count - 1 if isinstance(matched, int) else count]
        text = decode(ids, self.params.skip_special_tokens)
        if finished is None:
            return text.rstrip("\ufffd")  # the other bytes of the character are not sampled yet
        if not isinstance(matched, str):
            return text
        ignored = decode(ids[: max(0, self.params.min_new_tokens - 1)], self.params.skip_special_tokens)
        at = text.find(matched, len(ignored))
        return text[:at] if at >= 0 else text
