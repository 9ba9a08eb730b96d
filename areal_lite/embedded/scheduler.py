"""Continuous batching: choose the requests of each step.

Guarantees: a request ends exactly once; every token carries the version of the weights that computed it; requests start
in the order of arrival. The model thread owns all state and calls every method; other threads only read counters.

Running requests fill the slots ``[0, running)`` without gaps. The slots from ``max_running_requests`` on keep the KV
of finished requests: a prompt that shares a prefix with one of these, or with a running request, copies that prefix
and computes only the rest. Equal prompts that wait together are computed once.

Transformers' own continuous batching is several times slower: ``benchmarks/embedded_throughput.py`` measures both.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
import numpy as np
import torch
from numpy.typing import NDArray
from areal_lite.api.image_span import common_prefix
from areal_lite.embedded.generation_request import Decode, FinishReason, GenerationRequest, aborted
from areal_lite.embedded.model_runner import ModelRunner
from areal_lite.embedded.sampling import sample

logger = logging.getLogger(__name__)

_MIN_SHARED_PREFIX = 16  # tokens; for less, a plain prefill is cheaper than copying and masking


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    max_running_requests: int
    max_total_tokens: int  # prompt plus ``max_new_tokens``, summed over running requests; one above it runs alone
    max_prefill_tokens: int  # tokens of the prompts of one step, with padding; a longer prompt is the only one


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One slot of a prefill, shared by requests with equal tokens."""

    requests: list[GenerationRequest]
    tokens: list[int]
    donor: int | None  # slot to copy the first ``past`` columns from
    past: int


@dataclass(eq=False)
class Scheduler:
    """Runs requests on a model, step by step; the methods before ``can_step`` are commands between two steps."""

    runner: ModelRunner
    eos_ids: frozenset[int]
    """They end an output."""
    decode: Decode
    limits: BatchLimits
    weight_version: str
    keep_prefixes: bool
    """Later requests reuse the KV of finished ones, in the slots of ``runner`` beyond ``max_running_requests``."""

    def __post_init__(self) -> None:
        self.generated_tokens = 0
        self.paused = False
        self.running: list[GenerationRequest] = []
        self.waiting: deque[GenerationRequest] = deque()
        self._retained: dict[int, NDArray[np.int64]] = {}  # slot -> ids of its KV; oldest first
        self._stale_kv: set[GenerationRequest] = set()  # running on KV of earlier weights
        self.changed: list[GenerationRequest] = []
        """Requests that ended or, if they stream, have new tokens, since the thread last emptied this list."""

    def abort(self, requests: Sequence[GenerationRequest]) -> None:
        """End these requests with their tokens so far; requests that already ended stay as they are."""
        unwanted = set(requests)
        for request in self.waiting:
            if request in unwanted:
                self._finish(request, aborted() if request.output_ids else aborted("Abort in waiting queue"))
        self.waiting = deque(request for request in self.waiting if request not in unwanted)
        for request in [request for request in self.running if request in unwanted]:
            self._finish(request, aborted())
            self._leave(request)

    def abort_all(self) -> None:
        self.abort([*self.running, *self.waiting])

    def pause(self, mode: str) -> None:
        """Stop stepping. ``abort`` ends all requests, ``retract`` drops their KV, ``in_place`` keeps it."""
        self.paused = True
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            self.retract()

    def retract(self) -> None:
        """Return the running requests to the head of the queue; a prefill will recompute all their tokens."""
        for request in self.running:
            request.num_retractions += 1
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self._stale_kv.clear()

    def resume(self) -> None:
        self.paused = False

    def flush_cache(self) -> None:
        """Forget the KV of finished requests."""
        self._retained.clear()

    def change_weights(self, load: Callable[[], None], version: str | None, *, abort_all: bool) -> None:
        """Load new weights. Running requests continue on new KV or, if paused in place, on that of the old weights."""
        if abort_all:
            self.abort_all()
        if not self.paused:
            self.retract()
        self._stale_kv.update(self.running)
        self.flush_cache()
        load()
        if version is not None:
            self.weight_version = version

    @property
    def can_step(self) -> bool:
        """True if there is work and no pause."""
        return not self.paused and bool(self.running or self.waiting)

    def fail_running(self, error: Exception) -> None:
        """End the running requests with status 500."""
        logger.exception("a step failed; its requests get status 500")
        reason = aborted(f"{type(error).__name__}: {error}", status=500, kind="InternalServerError")
        for request in self.running:
            self._finish(request, reason)
        self.running = []
        self._stale_kv.clear()
        self.flush_cache()

    def step(self) -> None:
        """Compute the prompts that fit into one step, and sample a token for each request that is computed. Running
        requests take part, except where passes need padding."""
        requests = list(self.running)
        prefills = self._choose_prefills()
        if prefills and self.runner.pads:
            requests = []
        tokens = [[request.output_ids[-1]] for request in requests]
        past = [len(request.prompt) + len(request.output_ids) - 1 for request in requests]
        leaders = self._join(prefills)
        logits = self.runner.forward(
            [*range(len(requests)), *leaders],
            tokens + [prefill.tokens[prefill.past :] for prefill in prefills],
            past + [prefill.past for prefill in prefills],
            [request.images for request in [*requests, *(prefill.requests[0] for prefill in prefills)]],
        )
        sizes = [len(prefill.requests) for prefill in prefills]
        if any(size > 1 for size in sizes):
            sources = [leader for leader, size in zip(leaders, sizes, strict=True) for _ in range(size - 1)]
            targets = [leader + i for leader, size in zip(leaders, sizes, strict=True) for i in range(1, size)]
            self.runner.cache.copy_columns(sources, targets, max(len(prefill.tokens) for prefill in prefills))
            logits = logits.repeat_interleave(torch.tensor([1] * len(requests) + sizes, device=logits.device), 0)
        requests += [request for prefill in prefills for request in prefill.requests]
        self._extend(requests, logits)

    def _choose_prefills(self) -> list[_Prefill]:
        """Take requests from the head of the queue that fit into one prefill step."""
        room = self.limits.max_running_requests - len(self.running)
        reserved = sum(request.reserved_tokens for request in self.running)
        chosen: list[_Prefill] = []
        by_tokens: dict[tuple[int, ...], _Prefill] = {}
        skipped: list[GenerationRequest] = []
        while self.waiting and room > 0:
            request = self.waiting[0]
            if reserved + request.reserved_tokens > self.limits.max_total_tokens and (self.running or chosen):
                break
            keys = request.keys
            if (twin := by_tokens.get(tuple(keys))) is not None:
                twin.requests.append(request)
            else:
                prefill = self._plan_prefill(request, keys)
                fits = self._fits(prefill, chosen)
                if fits == "full":
                    break
                if fits == "later":
                    skipped.append(self.waiting.popleft())
                    continue
                chosen.append(prefill)
                by_tokens[tuple(keys)] = prefill
            self.waiting.popleft()
            reserved += request.reserved_tokens
            room -= 1
        self.waiting.extendleft(reversed(skipped))
        return chosen

    def _plan_prefill(self, request: GenerationRequest, keys: list[int]) -> _Prefill:
        """Find the slot with the longest prefix of these tokens, by their keys."""
        ids = np.asarray(keys, dtype=np.int64)
        donor, past = None, 0
        running = [(i, one.prompt_array) for i, one in enumerate(self.running) if one not in self._stale_kv]
        for slot, held in [*running, *self._retained.items()]:
            shared = min(common_prefix(ids, held), len(keys) - 1)  # the last token's logits are needed
            if shared > max(past, _MIN_SHARED_PREFIX - 1):
                donor, past = slot, shared
        return _Prefill([request], request.tokens, donor, past)

    def _fits(self, prefill: _Prefill, chosen: list[_Prefill]) -> str:
        """Decide whether a prefill joins this step: ``yes``, ``later`` (others in the queue may still) or ``full``."""
        if not chosen:
            return "yes"
        if self.runner.pads and (prefill.donor is None) != (chosen[0].donor is None):
            return "later"
        lengths = [len(one.tokens) - one.past for one in [*chosen, prefill]]
        computed = len(lengths) * max(lengths) if self.runner.pads else sum(lengths)
        if computed > self.limits.max_prefill_tokens:
            return "full"
        if computed - sum(lengths) > max(64, sum(lengths) // 4):
            return "later"
        ids = np.asarray(prefill.requests[0].keys, dtype=np.int64)
        for other in chosen:  # a long shared prefix is computed once, in this step, and copied in the next
            shared = common_prefix(ids, other.requests[0].prompt_array)
            if shared - prefill.past >= max(2 * _MIN_SHARED_PREFIX, lengths[-1] // 2):
                return "later"
        return "yes"

    def _join(self, prefills: list[_Prefill]) -> list[int]:
        """Give each of these requests a slot, copy prefixes, and return the first slot of each prefill."""
        leaders = []
        for prefill in prefills:
            leaders.append(len(self.running))
            for copy, request in enumerate(prefill.requests):
                if request.num_retractions == 0:
                    request.cached_tokens = len(request.prompt) if copy else prefill.past
            self.running += prefill.requests
        shared = [(one.donor, leader) for one, leader in zip(prefills, leaders, strict=True) if one.donor is not None]
        if shared:
            donors, targets = zip(*shared, strict=True)
            self.runner.cache.copy_columns(list(donors), list(targets), max(prefill.past for prefill in prefills))
        return leaders

    def _extend(self, requests: list[GenerationRequest], logits: torch.Tensor) -> None:
        """Sample one token for each of these running requests and remove those that are done."""
        sampled = sample(logits, requests, self.eos_ids)
        for i, request in enumerate(requests):
            if request.top_logprobs_num:
                request.output_top_logprobs.append(sampled.top[i])
            request.append(sampled.tokens[i], sampled.logprobs[i], self.weight_version)
            self.generated_tokens += 1
            reason = _finish_reason(request, self.eos_ids, self.decode)
            if reason is not None:
                self._finish(request, reason)
            elif request.stream:
                self.changed.append(request)
        for request in requests:
            if request.finish_reason is not None:
                self._leave(request)

    def _finish(self, request: GenerationRequest, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.changed.append(request)

    def _leave(self, request: GenerationRequest) -> None:
        """Remove a request from the batch: retain its KV, and move the last request into its slot."""
        slot, last = self.running.index(request), len(self.running) - 1
        columns = len(request.prompt) + max(len(request.output_ids) - 1, 0)
        if self.keep_prefixes and request not in self._stale_kv and columns >= _MIN_SHARED_PREFIX:
            self._retain(slot, np.asarray(request.keys[:columns], dtype=np.int64))
        self._stale_kv.discard(request)
        if slot != last:
            moved = self.running[slot] = self.running[last]
            self.runner.cache.copy_columns([last], [slot], len(moved.prompt) + len(moved.output_ids))
        self.running.pop()

    def _retain(self, slot: int, ids: NDArray[np.int64]) -> None:
        slots = range(self.limits.max_running_requests, self.runner.slots)
        target = next((one for one in slots if one not in self._retained), None)
        if target is None:
            target = next(iter(self._retained))
            del self._retained[target]
        self.runner.cache.copy_columns([slot], [target], len(ids))
        self._retained[target] = ids


def _finish_reason(request: GenerationRequest, eos_ids: frozenset[int], decode: Decode) -> FinishReason | None:
    params, count, token = request.params, len(request.output_ids), request.output_ids[-1]
    if request.grammar is not None:
        if fault := request.grammar.advance([token]):  # a limit of the library; the sampler obeys the grammar
            return aborted(f"the constraint failed: {fault}", status=400, kind="BadRequestError")
        if request.grammar.is_complete and (token in eos_ids or params.ignore_eos or not eos_ids):
            return {"type": "stop", "matched": token if token in eos_ids else None}
    if count >= params.min_new_tokens:
        if not params.ignore_eos and (token in params.stop_token_ids or token in eos_ids):
            return {"type": "stop", "matched": token}
        if params.stop:
            # A token has at least one byte, so a stop text spans at most as many tokens as it has bytes.
            window = max(len(text.encode()) for text in params.stop) + 8
            window = min(window, count - params.min_new_tokens + 1) if params.min_new_tokens else window
            tail = decode(request.written_ids[-window:], params.skip_special_tokens)
            for text in params.stop:
                if text in tail:
                    return {"type": "stop", "matched": text}
    return {"type": "length", "length": count} if count >= params.max_new_tokens else None
