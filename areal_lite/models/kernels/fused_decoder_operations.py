"""Arithmetic of Llama-like layers beside their matrix products, and its gradients, with torch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from areal_lite.models.decoder_family import Heads
from areal_lite.models.kernels.ragged_attention import Segments

_PRODUCTS = 256
"""Longest bin whose attention is plain products; torch's kernel is faster above."""
_SCORES = 1 << 18
"""Attention scores that are computed at once, unless those of one bin are more."""


class Tokens:
    """The tokens of all bins, one bin after another: their rotary angles, and which of them see one another.

    Args:
        cos: ``[T, width]``, and ``sin``.
        lengths: Tokens of each bin.
        segments: Which tokens see one another; None if a token sees all before it in its bin.
    """

    def __init__(
        self, cos: Tensor, sin: Tensor, lengths: Sequence[int], segments: Segments | None, heads: Heads
    ) -> None:
        # Both halves of a head have the same angles.
        self.cos, self.sin = (part.float()[:, : part.shape[1] // 2].contiguous() for part in (cos, sin))
        self.lengths, self.segments, self.heads = np.array(lengths), segments, heads
        self.starts = np.cumsum([0, *lengths])

    @cached_property
    def layout(self) -> tuple[NDArray[np.int64], ...]:
        """First segment of each bin and, of all segments, the ends of the queries, those of the keys, and the keys."""
        segments = self.segments or Segments.causal(self.lengths.tolist())
        ends = [part.numpy().astype(np.int64) for part in (segments.query_ends, segments.key_ends, segments.keys)]
        return np.searchsorted(ends[0], self.starts), *ends

    @cached_property
    def pieces(self) -> list[_Piece]:
        """Bins whose attention scores fit into a core's cache."""
        pieces, first = [], 0
        seen = self.segments and self.segments.seen(self.lengths.tolist(), int(self.lengths.max()))
        for end in range(1, len(self.lengths) + 1):
            scores = self.heads.queries * (end + 1 - first) * int(self.lengths[first : end + 1].max()) ** 2
            if end == len(self.lengths) or scores > _SCORES:
                pieces.append(_Piece.of(self.starts[first : end + 1], None if seen is None else seen[first:end]))
                first = end
        return pieces

    def turned(self, heads: Tensor, *, back: bool = False) -> Tensor:
        """Return heads ``[T, heads, width]`` turned by the tokens' angles, float32; ``back`` turns a gradient."""
        first, second = heads.float().chunk(2, -1)
        cos, sin, sign = self.cos[:, None], self.sin[:, None], 1 if back else -1
        first, second = (
            (first * cos).addcmul_(second, sin, value=sign),
            (second * cos).addcmul_(first, sin, value=-sign),
        )
        return torch.cat([first, second], -1)


class DecoderOperations:
    """Operations on ``T`` tokens. Residuals, norms, scores and softmax are float32; *half* is the dtype of products."""

    def add_norm(self, hidden: Tensor, added: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``hidden + added``, its RMS norm in half, and the factor ``[T, 1]`` that makes a mean square 1.

        Args:
            hidden: ``[T, width]`` float32.
            added: ``[T, width]`` half.
            scale: ``[width]``.
        """
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

    def gate_gradient(self, grad: Tensor, joined: Tensor) -> Tensor:
        """Return the gradient of ``joined``."""
        gate, up = joined.chunk(2, 1)
        return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)], 1)

    def attend(self, states: Tensor, tokens: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the queries of ``[T, (queries + 2 * keys) * width]`` read, and what the gradient needs.

        What is read is ``[T, queries * width]``.
        """
        queries, keys, width, _ = tokens.heads
        turned = states.view(len(states), -1, width).clone()
        turned[:, :-keys] = tokens.turned(turned[:, :-keys])
        read = turned.new_empty(len(turned), queries, width)
        saved = []
        with torch.autocast("cpu", enabled=False):
            for piece in tokens.pieces:
                part, kept = _way(piece).read(piece.take(turned), piece.mask, tokens.heads)
                piece.put(read, part)
                saved.append(kept)
        return read.flatten(1), (turned, *saved)

    def attend_gradient(self, grad: Tensor, tokens: Tokens, read: Tensor, saved: Sequence[Tensor]) -> Tensor:
        """Return the gradient of ``states``."""
        (turned, *saved), (queries, keys, width, _) = saved, tokens.heads
        grad, read = (rows.view(-1, queries, width) for rows in (grad, read))
        out = torch.empty_like(turned)
        for piece, kept in zip(tokens.pieces, saved, strict=True):
            parts = piece.take_gradient(grad), piece.take(turned), piece.take(read)
            piece.put(out, _way(piece).gradient(*parts, kept, piece.mask, tokens.heads))
        out[:, :-keys] = tokens.turned(out[:, :-keys], back=True)
        return out.flatten(1)


class _Piece(NamedTuple):
    """Bins padded to the longest."""

    bins: int
    length: int
    """Tokens of the longest."""
    places: Tensor | slice
    """``[bins * length]``, the token at each place; where padding is, any token."""
    used: Tensor | slice
    """The places that are not padding."""
    tokens: Tensor | slice
    """The tokens at those places."""
    mask: Tensor | None
    """``[bins, 1, length, length]``, added to the scores; None for long bins, if a token sees all before it."""

    @classmethod
    def of(cls, starts: NDArray[np.int64], seen: Tensor | None) -> _Piece:
        lengths = np.diff(starts)
        bins, longest = len(lengths), int(lengths.max())
        mask = None
        if seen is None and longest <= _PRODUCTS:
            seen = torch.ones(longest, longest, dtype=torch.bool).tril().expand(bins, 1, -1, -1)
        if seen is not None:
            seen = seen[..., :longest, :longest]
            mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        if lengths.min() == longest:
            tokens = slice(*starts[[0, -1]].tolist())
            return cls(bins, longest, tokens, slice(None), tokens, mask)
        places = torch.from_numpy((starts[:-1, None] + np.arange(longest)).clip(max=starts[-1] - 1).ravel())
        used = torch.from_numpy(np.flatnonzero(np.arange(longest) < lengths[:, None]))
        return cls(bins, longest, places, used, places[used], mask)

    def take(self, rows: Tensor) -> Tensor:
        """Return ``[bins, heads, length, width]`` of ``[T, heads, width]``."""
        return self._heads(rows[self.places])

    def take_gradient(self, rows: Tensor) -> Tensor:
        """Do as :meth:`take`, with 0 where padding is."""
        if isinstance(self.used, slice):
            return self.take(rows)
        padded = rows.new_zeros(self.bins * self.length, *rows.shape[1:])
        padded[self.used] = rows[self.tokens]
        return self._heads(padded)

    def put(self, rows: Tensor, heads: Tensor) -> None:
        """Write ``[bins, heads, length, width]`` back to ``[T, heads, width]``."""
        rows[self.tokens] = heads.transpose(1, 2).flatten(0, 1)[self.used].to(rows.dtype)

    def _heads(self, padded: Tensor) -> Tensor:
        return padded.view(self.bins, -1, *padded.shape[1:]).transpose(1, 2)


def _way(piece: _Piece) -> type[_Products] | type[_Kernel]:
    return _Products if piece.length <= _PRODUCTS else _Kernel


class _Kernel:
    """Attention of long bins, by torch's kernel."""

    @staticmethod
    def read(states: Tensor, mask: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor]:
        """Return what is read ``[b, queries, l, width]`` and the normalizer, from ``[b, queries + 2 * keys, ...]``."""
        read, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_Kernel._repeated(states, heads), is_causal=mask is None, attn_mask=mask, scale=heads.scale
        )
        return read, normalizer

    @staticmethod
    def gradient(
        grad: Tensor, states: Tensor, read: Tensor, normalizer: Tensor, mask: Tensor | None, heads: Heads
    ) -> Tensor:
        """Return the gradient of ``states``."""
        repeated = _Kernel._repeated(states, heads)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *repeated, read, normalizer, 0.0, mask is None, attn_mask=mask, scale=heads.scale
        )
        sums = [part.unflatten(1, (heads.keys, -1)).sum(2) for part in parts[1:]]  # of the queries that share a key
        return torch.cat([parts[0], *sums], 1)

    @staticmethod
    def _repeated(states: Tensor, heads: Heads) -> list[Tensor]:
        """Return three times ``[b, queries, l, width]``."""
        parts = torch.split(states, [heads.queries, heads.keys, heads.keys], 1)
        return [part.repeat_interleave(heads.queries // part.shape[1], 1) for part in parts]


class _Products:
    """Attention of short bins in whole matrices, three times as fast; weights are kept, so memory is quadratic."""

    @staticmethod
    def read(states: Tensor, mask: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor]:
        """Return what is read ``[b, queries, l, width]`` and the weights, from ``[b, queries + 2 * keys, ...]``."""
        assert mask is not None
        query, key, value = _Products._by_key(states, heads)
        scores = torch.bmm(query.float() * heads.scale, key.float().transpose(1, 2))
        weights = scores.view(len(mask), -1, *mask.shape[2:]).add_(mask).softmax(-1).to(states.dtype)
        read = torch.bmm(weights.view(len(query), -1, weights.shape[-1]), value)
        return read.view(len(mask), -1, *states.shape[2:]), weights

    @staticmethod
    def gradient(
        grad: Tensor, states: Tensor, read: Tensor, weights: Tensor, mask: Tensor | None, heads: Heads
    ) -> Tensor:
        """Return the gradient of ``states``."""
        assert mask is not None
        query, key, value = _Products._by_key(states, heads)
        below, weights = grad.reshape(query.shape), weights.view(*query.shape[:2], -1)
        scaled = below.float() * heads.scale
        change = torch.bmm(scaled, value.float().transpose(1, 2))
        change.sub_((scaled * read.reshape(query.shape)).sum(-1, keepdim=True)).mul_(weights)
        change = change.to(states.dtype)
        parts = (
            torch.bmm(change, key),
            torch.bmm(change.transpose(1, 2), query),
            torch.bmm(weights.transpose(1, 2), below),
        )
        return torch.cat([part.view(len(mask), -1, *states.shape[2:]) for part in parts], 1)

    @staticmethod
    def _by_key(states: Tensor, heads: Heads) -> list[Tensor]:
        """Return queries, keys and values; the heads that share a key are rows of one matrix."""
        parts = torch.split(states, [heads.queries, heads.keys, heads.keys], 1)
        return [part.reshape(len(states) * heads.keys, -1, heads.width) for part in parts]
