"""Arithmetic of Llama-like layers beside their matrix products, and its gradients: torch's operations, and C++.

The compiled ones, built at the first pass, are used in bfloat16 on a CPU where there is a C++ compiler with OpenMP.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from areal_lite.models.decoder_family import Heads
from areal_lite.models.kernels.compiler import ARRAY, COUNT, INT, NUMBER, addresses, compile_library
from areal_lite.models.kernels.ragged_attention import Segments

_PRODUCTS = 256  # longest bin whose attention is plain products; torch's kernel is faster above
_SCORES = 1 << 18  # attention scores computed at once, as a core's cache holds them; those of one bin may be more
_LONGEST = 8192
"""Longest causal bin whose attention is computed here; torch's kernel reads keys in blocks and is faster above. For a
tree it needs a mask of all tokens by all."""
_SOURCE = Path(__file__).with_suffix(".cpp")
_ARGUMENTS = {
    "attend": [*[ARRAY] * 5, INT],
    "attend_gradient": [*[ARRAY] * 6, INT],
    "add_norm": [*[ARRAY] * 3, NUMBER, *[COUNT] * 2, *[ARRAY] * 3, INT],
    "norm_gradient": [*[ARRAY] * 5, *[COUNT] * 2, *[ARRAY] * 3, INT],
    "gate": [ARRAY, *[COUNT] * 2, ARRAY, INT],
    "gate_gradient": [*[ARRAY] * 2, *[COUNT] * 2, ARRAY, INT],
}


class Tokens:
    """The tokens of all bins, bin after bin: their rotary angles ``cos`` and ``sin [T, width]``, the number of tokens
    of each bin, and which of them see one another; without ``segments``, a token sees all before it in its bin."""

    def __init__(
        self, cos: Tensor, sin: Tensor, lengths: Sequence[int], segments: Segments | None, heads: Heads
    ) -> None:
        # Both halves of a head have the same angles.
        self.cos, self.sin = (part.float()[:, : part.shape[1] // 2].contiguous() for part in (cos, sin))
        self.lengths, self.segments, self.heads = list(lengths), segments, heads

    @cached_property
    def layout(self) -> tuple[NDArray[np.int64], ...]:
        """First segment of each bin and, of all segments, the ends of the queries, those of the keys, and the keys.
        Compiled operations read them in place."""
        segments = self.segments or Segments.causal(self.lengths)
        ends = [part.numpy().astype(np.int64) for part in (segments.query_ends, segments.key_ends, segments.keys)]
        return np.searchsorted(ends[0], np.cumsum([0, *self.lengths])), *ends

    @cached_property
    def seen(self) -> Tensor | None:
        """``[B, 1, L, L]`` bool, True where a query sees a key; None if causal."""
        return None if self.segments is None else self.segments.seen(self.lengths, max(self.lengths))

    def pieces(self) -> Iterator[slice]:
        """Yield the bins whose attention is computed at once."""
        first = 0
        for end in range(1, len(self.lengths) + 1):
            longest = max(self.lengths[first : end + 1])
            if end == len(self.lengths) or self.heads.queries * (end + 1 - first) * longest**2 > _SCORES:
                yield slice(first, end)
                first = end

    def turned(self, heads: Tensor) -> Tensor:
        """Return heads ``[T, heads, width]`` turned by the tokens' angles, float32."""
        first, second = heads.float().chunk(2, -1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class DecoderOperations:
    """Operations on ``T`` tokens. Residuals, norms, scores and softmax are float32; *half* is the dtype of products."""

    def add_norm(self, hidden: Tensor, added: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``hidden + added``, its RMS norm in half, and the factor ``[T, 1]`` that makes a mean square 1.
        ``hidden [T, width]`` is float32, ``added`` half. Its :meth:`norm_gradient` takes a third of autograd's time."""
        total = hidden + added
        power = torch.linalg.vector_norm(total, dim=1, keepdim=True).square_()
        inverse = power.div_(total.shape[1]).add_(eps).rsqrt_()
        return total, (total * inverse).mul_(scale).to(added.dtype), inverse

    def norm_gradient(
        self, grad: Tensor, grad_total: Tensor, total: Tensor, scale: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of ``hidden``, ``added`` and ``scale`` from those of the norm and of the sum."""
        unit = total * inverse
        product = grad.float() * unit
        radial = (product @ scale)[:, None].mul_(inverse).div_(-total.shape[1])
        whole = grad.float().mul_(scale).mul_(inverse).addcmul_(unit, radial).add_(grad_total)
        return whole, whole.to(grad.dtype), product.sum(0)

    def gate(self, joined: Tensor) -> Tensor:
        """Return ``silu(gate) * up``, ``[T, width]``, of joined rows ``[T, 2 * width]``."""
        gate, up = joined.chunk(2, 1)
        return F.silu(gate) * up

    def attend(self, states: Tensor, tokens: Tokens) -> Tensor:
        """Return ``[T, queries * width]``, what the queries of ``states [T, (queries + 2 * keys) * width]`` read."""
        _, keys, width, _ = tokens.heads
        heads = states.view(len(states), -1, width)
        turned = torch.cat([tokens.turned(heads[:, :-keys]).to(states.dtype), heads[:, -keys:]], 1)
        bins, read = torch.split(turned, tokens.lengths), []
        with torch.autocast("cpu", enabled=False):
            for piece in tokens.pieces():
                seen = None if tokens.seen is None else tokens.seen[piece]
                padded = pad_sequence(list(bins[piece]), batch_first=True).transpose(1, 2)
                answers = _read(padded, seen, tokens.heads).transpose(1, 2)
                read += [one[:length] for one, length in zip(answers, tokens.lengths[piece], strict=True)]
        return torch.cat(read).flatten(1)


def _read(states: Tensor, seen: Tensor | None, heads: Heads) -> Tensor:
    """Return what is read ``[b, queries, l, width]``, from ``[b, queries + 2 * keys, l, width]``."""
    length = states.shape[2]
    seen = None if seen is None else seen[..., :length, :length]
    parts = torch.split(states, [heads.queries, heads.keys, heads.keys], 1)
    if length > _PRODUCTS:
        query, key, value = (part.repeat_interleave(heads.queries // part.shape[1], 1) for part in parts)
        return F.scaled_dot_product_attention(query, key, value, seen, is_causal=seen is None, scale=heads.scale)
    # Whole matrices, three times as fast; the heads that share a key are rows of one of them.
    query, key, value = (part.reshape(len(states) * heads.keys, -1, heads.width) for part in parts)
    scores = torch.bmm(query.float() * heads.scale, key.float().transpose(1, 2)).view(len(states), -1, length, length)
    hidden = ~(torch.ones(length, length, dtype=torch.bool).tril() if seen is None else seen)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(states.dtype)
    return torch.bmm(weights.view(len(query), -1, length), value).view(len(states), -1, length, heads.width)


class _Layout(ctypes.Structure):
    _fields_ = (
        *((name, ARRAY) for name in ("cos", "sin", "bins_segments", "query_ends", "key_ends", "seen")),
        *((name, COUNT) for name in ("bins", "heads", "groups", "width")),
        ("scale", NUMBER),
    )

    @classmethod
    def of(cls, tokens: Tokens) -> Self:
        queries, keys, width, scale = tokens.heads
        arrays = *addresses(tokens.cos, tokens.sin), *(part.ctypes.data for part in tokens.layout)
        return cls(*arrays, len(tokens.lengths), keys, queries // keys, width, scale)


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, library: ctypes.CDLL) -> Tensor:
        ctx.save_for_backward(joined)
        ctx.library = library
        rows, width = len(joined), joined.shape[1] // 2
        out = joined.new_empty(rows, width)
        library.gate(*addresses(joined), rows, width, *addresses(out), torch.get_num_threads())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (joined,) = ctx.saved_tensors
        out = torch.empty_like(joined)
        rows = *addresses(grad, joined), *grad.shape
        ctx.library.gate_gradient(*rows, *addresses(out), torch.get_num_threads())
        return out, None


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, tokens: Tokens, library: ctypes.CDLL) -> Tensor:
        queries, _, width, _ = tokens.heads
        turned, read = torch.empty_like(states), states.new_empty(len(states), queries * width)
        normalizer = tokens.cos.new_empty(len(states), queries)
        rows = addresses(states, turned, read, normalizer)
        library.attend(ctypes.byref(_Layout.of(tokens)), *rows, torch.get_num_threads())
        ctx.save_for_backward(turned, read, normalizer)
        ctx.tokens, ctx.library = tokens, library
        return read

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        turned, read, normalizer = ctx.saved_tensors
        out = torch.empty_like(turned)
        rows = addresses(grad, turned, read, normalizer, out)
        ctx.library.attend_gradient(ctypes.byref(_Layout.of(ctx.tokens)), *rows, torch.get_num_threads())
        return out, None, None


class CompiledOperations(DecoderOperations):
    """Reads each bin to its own end."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def add_norm(self, hidden: Tensor, added: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        total, normed, inverse = torch.empty_like(hidden), torch.empty_like(added), hidden.new_empty(len(hidden), 1)
        rows, out = addresses(hidden, added, scale), addresses(total, inverse, normed)
        self._library.add_norm(*rows, eps, *hidden.shape, *out, torch.get_num_threads())
        return total, normed, inverse

    def norm_gradient(
        self, grad: Tensor, grad_total: Tensor, total: Tensor, scale: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_total = grad_total.contiguous()
        gradients = torch.empty_like(total), torch.empty_like(grad), torch.empty_like(scale)
        rows = addresses(grad, grad_total, total, scale, inverse)
        self._library.norm_gradient(*rows, *total.shape, *addresses(*gradients), torch.get_num_threads())
        return gradients

    def gate(self, joined: Tensor) -> Tensor:
        out: Tensor = _Gate.apply(joined, self._library)  # type: ignore[no-untyped-call]
        return out

    def attend(self, states: Tensor, tokens: Tokens) -> Tensor:
        """Causal bins that are too long, and bins too few for all threads, are torch's."""
        pairs = len(tokens.lengths) * tokens.heads.keys  # each thread computes a key head of a bin
        is_long = tokens.segments is None and max(tokens.lengths) > _LONGEST
        if pairs < torch.get_num_threads() or is_long:
            return super().attend(states, tokens)
        read: Tensor = _Attention.apply(states, tokens, self._library)  # type: ignore[no-untyped-call]
        return read


@cache
def fused_decoder_operations(dtype: torch.dtype) -> DecoderOperations:
    """Return the compiled operations if they fit the dtype and can be compiled, else torch's."""
    library = None
    if dtype == torch.bfloat16:
        library = compile_library(_SOURCE, _ARGUMENTS, otherwise="training steps take a quarter longer")
    return DecoderOperations() if library is None else CompiledOperations(library)
