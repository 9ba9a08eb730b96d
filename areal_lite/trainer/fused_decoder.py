"""Forward and backward passes of a Llama-like model in bfloat16 on a CPU, in fewer and larger operations.

Gives what the model's own forward pass gives under autocast, up to the rounding of bfloat16: residuals, norms, rotary
angles, attention scores and softmax are float32. Weights are rounded once per update, projections of one input are one
product, and the last layer computes the chosen tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

FAMILIES = frozenset({"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"})
"""Decoders whose layers have this form."""
_PRODUCTS = 256
"""Longest bin whose attention is plain products; torch's kernel is faster above."""
_SCORES = 1 << 18
"""Attention scores that are computed at once, unless those of one bin are more."""


class FusedDecoder:
    """Reads packed bins.

    Args:
        decoder: Of one of the ``FAMILIES``; full attention, float32 weights on a CPU.
        dtype: Of products and saved activations.
    """

    def __init__(self, decoder: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self._decoder = decoder
        self._layers = [_Layer(layer, dtype) for layer in decoder.layers]

    @staticmethod
    def fits(decoder: Any) -> bool:
        """Return whether the decoder's layers have the form that is computed here."""
        config = decoder.config
        return (
            type(decoder).__name__ in FAMILIES
            and config.hidden_act == "silu"
            and config.attention_dropout == 0
            and not decoder.gradient_checkpointing
            and all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in decoder.parameters())
            and all(type(linear) is nn.Linear for layer in decoder.layers for linear in _linears(layer))
        )

    def states(
        self, input_ids: Tensor, position_ids: Tensor, lengths: Sequence[int], seen: Tensor | None, at: Tensor
    ) -> Tensor:
        """Return the states ``[N, hidden]`` at the chosen tokens, float32.

        Args:
            input_ids: ``[B, L]``.
            position_ids: ``[B, L]``.
            lengths: Tokens of each bin; the padding after them costs nothing.
            seen: ``[B, 1, L, L]`` bool, True where a query sees a key; None if causal.
            at: ``[N]`` flat positions.
        """
        used = (torch.arange(input_ids.shape[1]) < torch.tensor(lengths)[:, None]).flatten().nonzero()[:, 0]
        at = torch.searchsorted(used, at)
        hidden = self._decoder.embed_tokens(input_ids.flatten()[used])
        cos, sin = self._decoder.rotary_emb(hidden, position_ids.flatten()[used][None])
        tokens = _Tokens(cos[0], sin[0], lengths, seen, self._decoder.config.num_attention_heads)
        for layer in self._layers:
            read = layer.attend(layer.qkv(hidden, layer.input_norm), tokens)
            if layer is self._layers[-1]:
                hidden, read = hidden[at], read[at]
            hidden = layer.output.add_to(hidden, read)
            hidden = layer.down.add_to(hidden, _GatedSilu.apply(layer.gate_up(hidden, layer.mlp_norm)))  # type: ignore[no-untyped-call]
        normed: Tensor = self._decoder.norm(hidden)
        return normed


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    heads = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*heads, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


class _Layer:
    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        query, key, value, output, gate, up, down = _linears(layer)
        self.attention = layer.self_attn
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.output = _Product(dtype, query, key, value), _Product(dtype, output)
        self.gate_up, self.down = _Product(dtype, gate, up), _Product(dtype, down)

        self.queries, self.keys, _ = (size // self.attention.head_dim for size in self.qkv.sizes)

    def attend(self, states: Tensor, tokens: _Tokens) -> Tensor:
        attention, queries, keys = self.attention, self.queries, self.keys
        if hasattr(attention, "q_norm"):
            query, key, value = torch.split(states.view(len(states), -1, attention.head_dim), [queries, keys, keys], 1)
            states = torch.cat([attention.q_norm(query), attention.k_norm(key), value], 1).flatten(1)
        read: Tensor = _Attention.apply(states, tokens, queries, keys, attention.scaling)  # type: ignore[no-untyped-call]
        return read


class _Product:
    """One product with the weights of several linear layers."""

    def __init__(self, dtype: torch.dtype, *linears: nn.Linear) -> None:
        self.weights = [linear.weight for linear in linears]
        self.biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self.sizes = [linear.out_features for linear in linears]
        self._rounded = torch.empty(sum(self.sizes), linears[0].in_features, dtype=dtype)
        self._versions: list[tuple[int, int]] = []

    def rounded(self) -> Tensor:
        """Return the joined weight, rounded again if it has changed."""
        versions = [(weight.data_ptr(), weight._version) for weight in self.weights]
        if versions != self._versions:
            for part, weight in zip(torch.split(self._rounded, self.sizes), self.weights, strict=True):
                part.copy_(weight.detach())
            self._versions = versions
        return self._rounded

    def __call__(self, hidden: Tensor, norm: Any) -> Tensor:
        """Return the product with the normed ``hidden``."""
        product: Tensor = _NormProduct.apply(  # type: ignore[no-untyped-call]
            hidden, norm.weight, norm.variance_epsilon, self.rounded(), self.sizes, *self.weights
        )
        return product + torch.cat(self.biases).to(product.dtype) if self.biases else product

    def add_to(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Return ``hidden`` plus the product with ``states``."""
        total: Tensor = _AddProduct.apply(hidden, states, self.rounded(), *self.weights)  # type: ignore[no-untyped-call]
        return total + self.biases[0] if self.biases else total


class _NormProduct(torch.autograd.Function):
    """RMS norm of float32 rows, then the product with a joined weight."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, scale: Tensor, eps: float, rounded: Tensor, sizes: list[int], *weights: Tensor
    ) -> Tensor:
        power = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).square_()
        inverse = power.div_(hidden.shape[-1]).add_(eps).rsqrt_()
        normed = (hidden * inverse).mul_(scale).to(rounded.dtype)
        ctx.save_for_backward(hidden, scale, inverse, normed)
        ctx.rounded, ctx.sizes = rounded, sizes
        return F.linear(normed, rounded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, scale, inverse, normed = ctx.saved_tensors
        own = (part.float() for part in (grad.T @ normed).split(ctx.sizes))
        grad_hidden = (grad @ ctx.rounded).float()
        unit = hidden * inverse
        product = grad_hidden * unit
        radial = (product @ scale)[:, None].mul_(inverse).div_(-hidden.shape[-1])
        grad_hidden.mul_(scale).mul_(inverse).addcmul_(unit, radial)
        return grad_hidden, product.sum(0), None, None, None, *own


class _AddProduct(torch.autograd.Function):
    """A float32 residual plus the product with a weight."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, states: Tensor, rounded: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        ctx.rounded = rounded
        return hidden + F.linear(states, rounded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (states,) = ctx.saved_tensors
        rounded = grad.to(states.dtype)
        return grad, rounded @ ctx.rounded, None, (rounded.T @ states).float()


class _GatedSilu(torch.autograd.Function):
    """``silu(gate) * up`` of joined rows."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor) -> Tensor:
        gate, up = joined.chunk(2, -1)
        active = F.silu(gate)
        ctx.save_for_backward(joined, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        joined, active = ctx.saved_tensors
        gate, up = joined.chunk(2, -1)
        return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * active], -1)


class _Tokens:
    """The tokens of all bins, one bin after another: their rotary angles, and which of them see one another."""

    def __init__(self, cos: Tensor, sin: Tensor, lengths: Sequence[int], seen: Tensor | None, queries: int) -> None:
        # Both halves of a head have the same angles.
        self._cos, self._sin = (part.float()[:, None, : part.shape[1] // 2] for part in (cos, sin))
        self.pieces: list[_Piece] = []
        """Bins whose attention scores fit into a core's cache."""
        starts = np.cumsum([0, *lengths])
        first = 0
        for end in range(1, len(lengths) + 1):
            if end == len(lengths) or queries * (end + 1 - first) * max(lengths[first : end + 1]) ** 2 > _SCORES:
                self.pieces.append(_Piece.of(starts[first : end + 1], None if seen is None else seen[first:end]))
                first = end

    def turned(self, heads: Tensor, *, back: bool = False) -> Tensor:
        """Return heads ``[T, heads, width]`` turned by the tokens' angles, float32; ``back`` turns a gradient."""
        first, second = heads.float().chunk(2, -1)
        cos, sin, sign = self._cos, self._sin, 1 if back else -1
        first, second = (
            (first * cos).addcmul_(second, sin, value=sign),
            (second * cos).addcmul_(first, sin, value=-sign),
        )
        return torch.cat([first, second], -1)


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


class _Attention(torch.autograd.Function):
    """Rotary attention of joined queries, keys and values ``[T, (queries + 2 * keys) * width]``."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, tokens: _Tokens, queries: int, keys: int, scale: float) -> Tensor:
        turned = states.view(len(states), queries + 2 * keys, -1).clone()
        turned[:, :-keys] = tokens.turned(turned[:, :-keys])
        read = turned.new_empty(len(turned), queries, turned.shape[2])
        saved = []
        with torch.autocast("cpu", enabled=False):
            for piece in tokens.pieces:
                part, kept = _way(piece).read(piece.take(turned), piece.mask, keys, scale)
                piece.put(read, part)
                saved.append(kept)
        ctx.save_for_backward(turned, read, *saved)
        ctx.tokens, ctx.keys, ctx.scale = tokens, keys, scale
        return read.flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        turned, read, *saved = ctx.saved_tensors
        tokens: _Tokens = ctx.tokens
        grad = grad.view_as(read)
        out = torch.empty_like(turned)
        for piece, kept in zip(tokens.pieces, saved, strict=True):
            parts = piece.take_gradient(grad), piece.take(turned), piece.take(read)
            piece.put(out, _way(piece).gradient(*parts, kept, piece.mask, ctx.keys, ctx.scale))
        out[:, : -ctx.keys] = tokens.turned(out[:, : -ctx.keys], back=True)
        return out.flatten(1), None, None, None, None


def _way(piece: _Piece) -> type[_Products] | type[_Kernel]:
    return _Products if piece.length <= _PRODUCTS else _Kernel


class _Kernel:
    """Attention of long bins, by torch's kernel."""

    @staticmethod
    def read(heads: Tensor, mask: Tensor | None, keys: int, scale: float) -> tuple[Tensor, Tensor]:
        """Return what is read ``[b, queries, l, width]`` and the normalizer, from ``[b, queries + 2 * keys, ...]``."""
        read, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_Kernel._repeated(heads, keys), is_causal=mask is None, attn_mask=mask, scale=scale
        )
        return read, normalizer

    @staticmethod
    def gradient(
        grad: Tensor, heads: Tensor, read: Tensor, normalizer: Tensor, mask: Tensor | None, keys: int, scale: float
    ) -> Tensor:
        """Return the gradient of ``heads``."""
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *_Kernel._repeated(heads, keys), read, normalizer, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        sums = [part.unflatten(1, (keys, -1)).sum(2) for part in parts[1:]]  # of the queries that share a key
        return torch.cat([parts[0], *sums], 1)

    @staticmethod
    def _repeated(heads: Tensor, keys: int) -> list[Tensor]:
        """Return three times ``[b, queries, l, width]``."""
        queries = heads.shape[1] - 2 * keys
        return [
            part.repeat_interleave(queries // part.shape[1], 1) for part in torch.split(heads, [queries, keys, keys], 1)
        ]


class _Products:
    """Attention of short bins in whole matrices, three times as fast; weights are kept, so memory is quadratic."""

    @staticmethod
    def read(heads: Tensor, mask: Tensor | None, keys: int, scale: float) -> tuple[Tensor, Tensor]:
        """Return what is read ``[b, queries, l, width]`` and the weights, from ``[b, queries + 2 * keys, ...]``."""
        assert mask is not None
        query, key, value = _Products._by_key(heads, keys)
        scores = torch.bmm(query.float() * scale, key.float().transpose(1, 2))
        weights = scores.view(len(mask), -1, *mask.shape[2:]).add_(mask).softmax(-1).to(heads.dtype)
        read = torch.bmm(weights.view(len(query), -1, weights.shape[-1]), value)
        return read.view(len(mask), -1, *heads.shape[2:]), weights

    @staticmethod
    def gradient(
        grad: Tensor, heads: Tensor, read: Tensor, weights: Tensor, mask: Tensor | None, keys: int, scale: float
    ) -> Tensor:
        """Return the gradient of ``heads``."""
        assert mask is not None
        query, key, value = _Products._by_key(heads, keys)
        below, weights = grad.reshape(query.shape), weights.view(*query.shape[:2], -1)
        scaled = below.float() * scale
        change = torch.bmm(scaled, value.float().transpose(1, 2))
        change.sub_((scaled * read.reshape(query.shape)).sum(-1, keepdim=True)).mul_(weights)
        change = change.to(heads.dtype)
        parts = (
            torch.bmm(change, key),
            torch.bmm(change.transpose(1, 2), query),
            torch.bmm(weights.transpose(1, 2), below),
        )
        return torch.cat([part.view(len(mask), -1, *heads.shape[2:]) for part in parts], 1)

    @staticmethod
    def _by_key(heads: Tensor, keys: int) -> list[Tensor]:
        """Return queries, keys and values; the heads that share a key are rows of one matrix."""
        parts = torch.split(heads, [heads.shape[1] - 2 * keys, keys, keys], 1)
        return [part.reshape(len(heads) * keys, -1, heads.shape[-1]) for part in parts]
