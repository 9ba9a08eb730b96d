"""Sample a whole batch at once: log-probs in SGLang's convention, filters, seeded choices.

Guarantees that a request's token depends only on its logits, parameters, seed and position, never on other requests.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple
import numpy as np
import torch
from torch import Tensor
from areal_lite.embedded.generation_request import GenerationRequest
from areal_lite.models.kernels.compiler import addresses
from areal_lite.models.kernels.score_kernels import score_library

_BLOCK = 128
_ROWS = 16  # requests sampled together on a CPU: what one pass over their logits writes is in its caches for the next
_FIRST_TRY = 1024  # enough for most top-p values; a full sort of the vocabulary costs 7 times as much


class Sampled(NamedTuple):
    """One sampled token per request."""

    tokens: list[int]
    logprobs: list[float]  # nats, fp32 ``log_softmax(logits / temperature)``; temperature 0 does not divide the logits
    top: list[list[tuple[float, int]]]  # the ``top_logprobs_num`` most probable ``(log-prob, id)``, best first


def sample(logits: Tensor, requests: Sequence[GenerationRequest], eos_ids: frozenset[int]) -> Sampled:
    """Sample the next token of each request from ``logits [n, vocab]`` of any float type. ``min_new_tokens`` excludes
    ``eos_ids``, besides the request's own stop ids. FloatingPointError if logits are NaN, +inf or all -inf."""
    count, on_cpu = len(requests), logits.device.type == "cpu"
    library = score_library() if on_cpu and logits.dtype == torch.bfloat16 else None
    asks_more = [one.params.has_filters or _is_shaped(one) or one.top_logprobs_num for one in requests]
    simple = [i for i in range(count) if library is not None and not asks_more[i]]
    others = sorted({*range(count)} - {*simple})
    size = _ROWS if on_cpu else max(1, count)
    rows: dict[int, tuple[Any, ...]] = {}
    for numbers in filter(None, [simple, *(others[i : i + size] for i in range(0, len(others), size))]):
        parts = _take(logits, numbers), [requests[i] for i in numbers]
        sampled = _sample_simple(library, *parts) if numbers is simple else _sample(*parts, eos_ids)
        rows.update(zip(numbers, zip(*sampled, strict=True), strict=True))
    if any(math.isnan(logprob) for _, logprob, _ in rows.values()):
        raise FloatingPointError(
            "the model's logits are not numbers: its weights are NaN, or too large for their dtype"
        )
    return Sampled(*map(list, zip(*(rows[i] for i in range(count)), strict=True)))


def _is_shaped(request: GenerationRequest) -> bool:
    params, early = request.params, len(request.output_ids) < request.params.min_new_tokens
    return early or params.has_penalties or bool(params.logit_bias) or request.grammar is not None


def _sample_simple(library: Any, logits: Tensor, requests: Sequence[GenerationRequest]) -> Sampled:
    logits, uniforms = logits.contiguous(), torch.from_numpy(_uniforms(requests))
    temperatures = torch.tensor([request.params.temperature for request in requests])
    ids, logprobs = torch.empty(len(requests), dtype=torch.long), torch.empty(len(requests))
    inputs, threads = addresses(logits, temperatures, uniforms), torch.get_num_threads()
    library.sample(*inputs, *logits.shape, *addresses(ids, logprobs), threads)
    return Sampled(ids.tolist(), logprobs.tolist(), [[] for _ in requests])


def _sample(logits: Tensor, requests: Sequence[GenerationRequest], eos_ids: frozenset[int]) -> Sampled:
    temperatures = [request.params.temperature for request in requests]
    scaled = logits = logits.float()
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        scaled = logits / torch.tensor([[temperature or 1.0] for temperature in temperatures], device=logits.device)
    logprobs = torch.log_softmax(scaled, dim=-1)
    allowed = _shaped(logits, logprobs, requests, eos_ids)
    tokens = torch.empty(len(requests), dtype=torch.long, device=logits.device)
    greedy = [i for i, temperature in enumerate(temperatures) if temperature == 0.0]
    filtered = [i for i, one in enumerate(requests) if one.params.temperature > 0.0 and one.params.has_filters]
    plain = sorted({*range(len(requests))} - {*greedy, *filtered})
    if greedy:
        tokens[greedy] = _take(allowed, greedy).argmax(dim=-1)
    uniforms = torch.from_numpy(_uniforms(requests)).to(logits.device)
    if plain:
        tokens[plain] = _pick(_take(allowed, plain).exp(), uniforms[plain])
    if filtered:
        chosen_requests = [requests[i] for i in filtered]
        tokens[filtered] = _pick_filtered(_take(allowed, filtered).exp(), uniforms[filtered], chosen_requests)
    chosen = logprobs.gather(1, tokens.clamp_(max=logprobs.shape[1] - 1)[:, None])[:, 0]  # NaN are inverted beyond it
    top: list[list[tuple[float, int]]] = [[] for _ in requests]
    for i, request in enumerate(requests):
        if count := min(request.top_logprobs_num, logprobs.shape[1]):
            values, ids = logprobs[i].topk(count)
            top[i] = list(zip(values.tolist(), ids.tolist(), strict=True))
    return Sampled(tokens.tolist(), chosen.tolist(), top)


def _take(values: Tensor, numbers: list[int]) -> Tensor:
    return values if len(numbers) == values.shape[0] else values[numbers]


def _shaped(logits: Tensor, logprobs: Tensor, requests: Sequence[GenerationRequest], eos_ids: frozenset[int]) -> Tensor:
    """Return the log-probs to sample from: after penalties, biases, constraints and ``min_new_tokens``."""
    shaped = logprobs
    for i, request in enumerate(requests):
        params = request.params
        if _is_shaped(request):
            if shaped is logprobs:
                shaped = logprobs.clone()
            stops = eos_ids | params.stop_token_ids if len(request.output_ids) < params.min_new_tokens else frozenset()
            shaped[i] = torch.log_softmax(_shaped_logits(logits[i], request, stops) / (params.temperature or 1.0), -1)
    return shaped


def _shaped_logits(logits: Tensor, request: GenerationRequest, stops: frozenset[int]) -> Tensor:
    """Shape ``logits [vocab]`` of one request in SGLang's order; ``stops`` are excluded unless nothing else is left."""
    params, device = request.params, logits.device
    logits = logits.clone()
    if params.has_penalties and (written := request.written_ids):
        ids, counts = (torch.from_numpy(found).to(device) for found in np.unique(written, return_counts=True))
        penalized = logits[ids] - params.frequency_penalty * counts - params.presence_penalty
        factor = params.repetition_penalty
        logits[ids] = torch.where(penalized < 0, penalized * factor, penalized / factor)
    if params.logit_bias:
        logits[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), device=device)
    if request.grammar is not None:
        logits[~torch.from_numpy(request.grammar.allowed()).to(device)] = -torch.inf
    if stops:
        continued = logits.clone()
        continued[list(stops)] = -torch.inf
        if bool(continued.max() > -torch.inf):
            return continued
    return logits


def _uniforms(requests: Sequence[GenerationRequest]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return one number in [0, 1) per request: the splitmix64 hash of its seed and position."""
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    positions = np.array([request.num_continued + len(request.output_ids) + 1 for request in requests], dtype=np.uint64)
    for addend in (positions, np.uint64(1)):
        seeds = seeds + addend * np.uint64(0x9E3779B97F4A7C15)
        seeds = (seeds ^ (seeds >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        seeds = (seeds ^ (seeds >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        seeds = seeds ^ (seeds >> np.uint64(31))
    uniforms: np.ndarray[tuple[int], np.dtype[np.float64]] = (seeds >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniforms


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the cumulative sum of ``weights [n, choices]`` (not normalised) at ``uniforms [n]``. Choose a block, then
    the place in it: a float64 sum over the vocabulary costs a fifth of a decode step, a float32 sum loses the tail."""
    missing = -weights.shape[1] % _BLOCK
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    blocks = padded.view(weights.shape[0], -1, _BLOCK)
    sums = blocks.sum(dim=-1).double()
    block = _invert(sums, uniforms)[:, None]
    ends = sums.cumsum(dim=-1)
    size = sums.gather(1, block)
    within = (uniforms[:, None] * ends[:, -1:] - (ends.gather(1, block) - size)) / size
    numbers = torch.arange(len(uniforms), device=weights.device)
    return block[:, 0] * _BLOCK + _invert(blocks[numbers, block[:, 0]].double(), within[:, 0].clamp(0.0, 1.0))


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    ends = weights.cumsum(dim=-1)
    total = ends[:, -1:]
    # Rounding must not make the target equal the total, because no weight lies beyond it.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(ends, target, right=True)[:, 0].clamp(max=weights.shape[1] - 1)  # NaN end beyond it


def _pick_filtered(probabilities: Tensor, uniforms: Tensor, requests: list[GenerationRequest]) -> Tensor:
    """Sample with top-k, top-p and min-p as SGLang does: all three act on the unfiltered, sorted probabilities."""
    vocab_size = probabilities.shape[1]
    top_k = torch.tensor([r.params.top_k if r.params.top_k > 0 else vocab_size for r in requests])
    top_p = torch.tensor([r.params.top_p for r in requests], device=probabilities.device)[:, None]
    min_p = torch.tensor([r.params.min_p for r in requests], device=probabilities.device)[:, None]
    width = min(int(top_k.max()), _FIRST_TRY, vocab_size)
    kept, ids = probabilities.topk(width)
    if width < int(top_k.max()):
        covered = (kept.sum(-1) >= top_p[:, 0]) | (kept[:, -1] < min_p[:, 0] * kept[:, 0])
        if not bool((covered | (top_k.to(covered.device) <= width)).all()):
            kept, ids = probabilities.sort(dim=-1, descending=True)
    before = kept.cumsum(dim=-1, dtype=torch.float64) - kept
    ranks = torch.arange(kept.shape[1], device=kept.device)
    drop = (before > top_p) | (ranks >= top_k.to(kept.device)[:, None]) | (kept < min_p * kept[:, :1])
    return ids.gather(1, _pick(kept.masked_fill(drop, 0.0), uniforms)[:, None])[:, 0]
