"""Attention over sequences side by side in one bin: no padding, and no quadratic mask over all tokens.

Guarantees that a query sees only the keys of its own segment, up to itself; in a windowed layer only the last of them.
On a GPU in half precision torch's variable-length kernel computes it; elsewhere the segments are computed one after
another, which is worth it where they are long.

Transformers selects it by the name :data:`RAGGED`. A forward pass without segments is plain attention.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from areal_lite.models.attention_windows import causal_window
from areal_lite.models.parallel.sequence_parallel import SequenceParallel

RAGGED = "areal_lite_ragged"  # name of the attention implementation
_KERNEL_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True if the kernel takes fewer heads of keys than of queries; it does since torch 2.12."""


@dataclass(frozen=True, slots=True)
class Segments:
    """``S`` segments of ``T`` tokens side by side; the queries of a segment are the last of its keys."""

    query_ends: Tensor  # ``[S + 1]`` int32, from 0: the ends of the segments' queries
    key_ends: Tensor  # ``[S + 1]`` int32, from 0: the ends of the segments' keys
    keys: Tensor  # ``[K]`` int64, the token of each key; a shared prefix appears once in every segment
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, parts: Iterable[tuple[NDArray[np.int64], int, int]], device: torch.device) -> Self:
        """Return the segments of ``(prefix, begin, end)``: the tokens from ``begin`` to ``end`` see those of ``prefix``
        and each other, up to themselves. The parts are in the order of their tokens; empty ones are left out."""
        queries, keys = [0], [np.arange(0)]
        for prefix, begin, end in parts:
            if begin < end:
                queries.append(end)
                keys.append(np.concatenate((prefix, np.arange(begin, end))))
        key_ends = np.cumsum([len(tokens) for tokens in keys])
        return cls(
            query_ends=torch.tensor(queries, dtype=torch.int32, device=device),
            key_ends=torch.tensor(key_ends, dtype=torch.int32, device=device),
            keys=torch.from_numpy(np.concatenate(keys)).to(device),
            longest_query=int(np.diff(queries).max()),
            longest_key=int(np.diff(key_ends).max()),
        )

    @classmethod
    def causal(cls, lengths: Sequence[int]) -> Self:
        """Return one segment for each bin, whose tokens see all tokens before them."""
        ends = np.cumsum([0, *lengths]).tolist()
        return cls.of(((np.arange(0), *bin) for bin in pairwise(ends)), torch.device("cpu"))

    def seen(self, lengths: Sequence[int], width: int) -> Tensor:
        """Return ``[B, 1, width, width]`` bool, True where the token of a bin sees the other; ``lengths`` are those of
        the bins, which are padded. Padding sees itself: a query that sees nothing is NaN in some kernels."""
        starts = np.cumsum([0, *lengths])
        seen = torch.eye(width, dtype=torch.bool).repeat(len(lengths), 1, 1)
        keys = self.keys.cpu()
        query_spans, key_spans = (pairwise(ends.tolist()) for ends in (self.query_ends, self.key_ends))
        for (begin, end), span in zip(query_spans, key_spans, strict=True):
            number = int(np.searchsorted(starts, begin, "right")) - 1
            rows = seen[number, begin - starts[number] : end - starts[number]]
            visible = causal_window(end - begin, span[1] - span[0], None, rows.device)
            rows[:, keys[slice(*span)] - starts[number]] = visible
        return seen[:, None].to(self.keys.device)


def ragged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return ``[1, T, heads, width]`` from inputs ``[1, heads, T, width]``, the layout of transformers; with an
    ``exchange`` of this rank's tokens alone, while the ``segments`` are those of all."""
    exchange: SequenceParallel | None = options.pop("exchange", None)
    if exchange is not None:
        query, key, value = map(exchange.to_heads, (query, key, value))
        read, _ = ragged_attention(module, query, key, value, attention_mask, **options)
        return exchange.to_tokens(read), None
    segments: Segments | None = options.pop("segments", None)
    window, kept = options.get("sliding_window"), key.shape[2]
    if segments is None or options.get("softcap") is not None:  # which plain attention refuses
        if attention_mask is None and window is not None and window < kept:
            attention_mask = causal_window(query.shape[2], kept, window, query.device)
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return plain
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query, key, value = (heads[0].transpose(0, 1).to(dtype) for heads in (query, key, value))
    # The gradient of index_select is quicker than that of [...].
    key, value = (heads.index_select(0, segments.keys) for heads in (key, value))
    attend = _by_kernel if query.is_cuda and dtype != torch.float32 else _one_by_one
    return attend(query, key, value, segments, options.get("scaling"), window)[None], None


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None = None
) -> Tensor:
    options: dict[str, Any] = {}
    if _KERNEL_GROUPS_HEADS:
        options["enable_gqa"] = True
    elif (repeats := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    ends = segments.query_ends, segments.key_ends, segments.longest_query, segments.longest_key
    around = (-1 if window is None else window - 1, 0)  # keys before and after a query; aligned to the last
    # Returns a pair only on request.
    out: Tensor = varlen_attn(query, key, value, *ends, scale=scale, window_size=around, **options)  # type: ignore[assignment]
    return out


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None = None
) -> Tensor:
    parts = []
    for queries, keys in zip(pairwise(segments.query_ends.tolist()), pairwise(segments.key_ends.tolist()), strict=True):
        q = query[slice(*queries)].transpose(0, 1)
        k, v = (heads[slice(*keys)].transpose(0, 1) for heads in (key, value))
        # Torch's bias reserves memory for each pair; is_causal, which it becomes for as many keys as queries, does not.
        bias: Any = None if q.shape[1] == k.shape[1] else causal_lower_right(q.shape[1], k.shape[1])
        if window is not None and window < k.shape[1]:
            bias = causal_window(q.shape[1], k.shape[1], window, q.device)
        options: dict[str, Any] = {"is_causal": bias is None, "scale": scale, "enable_gqa": True}
        parts.append(F.scaled_dot_product_attention(q[None], k[None], v[None], bias, **options))
    return torch.cat(parts, 2)[0].transpose(0, 1)


AttentionInterface.register(RAGGED, ragged_attention)
