"""Forward and backward passes of a Llama-like model in bfloat16 on a CPU, in fewer and larger operations.

Gives what the model's own forward pass gives under autocast, up to the rounding of bfloat16: residuals, norms, rotary
angles, attention scores and softmax are float32. Weights are rounded once per update, projections of one input are one
product, and the last layer computes the chosen tokens only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FAMILIES = frozenset({"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"})
"""Decoders whose layers have this form."""
_PRODUCTS = 256
"""Longest bin whose attention has its gradient by plain products; torch's kernel is faster above."""
_SCORES = 1 << 18
"""Attention scores that are computed at once, unless those of one bin are more."""
_LEAST = -80.0
"""Smallest logarithm of an attention weight; exponentials that underflow take ten times as long."""


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
            and not getattr(decoder, "gradient_checkpointing", False)
            and all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in decoder.parameters())
            and all(type(linear) is nn.Linear for layer in decoder.layers for linear in _linears(layer))
        )

    def states(self, input_ids: Tensor, position_ids: Tensor, seen: Tensor | None, at: Tensor) -> Tensor:
        """Return the states ``[N, hidden]`` at the chosen tokens, float32.

        Args:
            input_ids: ``[B, L]``.
            position_ids: ``[B, L]``.
            seen: ``[B, 1, L, L]`` bool, True where a query sees a key; None if causal.
            at: ``[N]`` flat positions.
        """
        hidden = self._decoder.embed_tokens(input_ids)
        cos, sin = self._decoder.rotary_emb(hidden, position_ids)
        angles = _Angles(cos, sin, seen)
        hidden = hidden.flatten(0, 1)
        for layer in self._layers:
            states = layer.qkv(hidden, layer.input_norm)
            read = layer.attend(states, angles)
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

    def attend(self, states: Tensor, angles: _Angles) -> Tensor:
        attention = self.attention
        queries, keys, _ = (size // attention.head_dim for size in self.qkv.sizes)
        if hasattr(attention, "q_norm"):
            query, key, value = torch.split(states.view(len(states), -1, attention.head_dim), [queries, keys, keys], 1)
            with torch.autocast("cpu", enabled=False):
                query, key = attention.q_norm(query), attention.k_norm(key)
            states = torch.cat([query, key, value], 1).flatten(1)
        read: Tensor = _Attention.apply(states, angles, queries, keys, attention.scaling)  # type: ignore[no-untyped-call]
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


class _Angles:
    """Rotary angles of each token, and the tokens that see one another."""

    def __init__(self, cos: Tensor, sin: Tensor, seen: Tensor | None) -> None:
        self.bins, self.length = cos.shape[:2]
        self.cos, self.sin = (part.float()[:, :, None] for part in (cos, sin))
        if seen is None:
            seen = torch.ones(self.length, self.length, dtype=torch.bool).tril().expand(self.bins, 1, -1, -1)
        self.mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        """``[B, 1, L, L]``, added to the scores."""

    def turned(self, heads: Tensor, here: slice) -> Tensor:
        """Return heads ``[b, L, heads, width]`` turned by the angles of the bins ``here``, float32."""
        first, second = heads.float().chunk(2, -1)
        cos, sin = self.cos[here].chunk(2, -1), self.sin[here].chunk(2, -1)
        return torch.cat(
            [(first * cos[0]).addcmul_(second, sin[0], value=-1), (second * cos[1]).addcmul_(first, sin[1])], -1
        )

    def turned_back(self, grad: Tensor, here: slice) -> Tensor:
        """Return the gradient before :meth:`turned`."""
        first, second = grad.chunk(2, -1)
        cos, sin = self.cos[here].chunk(2, -1), self.sin[here].chunk(2, -1)
        return torch.cat(
            [(first * cos[0]).addcmul_(second, sin[1]), (second * cos[1]).addcmul_(first, sin[0], value=-1)], -1
        )


class _Attention(torch.autograd.Function):
    """Rotary attention of joined queries, keys and values ``[B * L, (queries + 2 * keys) * width]``."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, angles: _Angles, queries: int, keys: int, scale: float) -> Tensor:
        heads = states.view(angles.bins, angles.length, queries + 2 * keys, -1)
        turned = heads.clone()
        for here in _pieces(angles, queries):
            turned[here, :, :-keys] = angles.turned(heads[here, :, :-keys], here)
        read, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_repeated(turned, queries, keys), attn_mask=angles.mask, scale=scale
        )
        ctx.save_for_backward(turned, read, normalizer)
        ctx.angles, ctx.queries, ctx.keys, ctx.scale = angles, queries, keys, scale
        joined: Tensor = read.transpose(1, 2).reshape(len(states), -1)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        turned, read, normalizer = ctx.saved_tensors
        angles: _Angles = ctx.angles
        grad = grad.view(*turned.shape[:2], ctx.queries, -1).transpose(1, 2)
        out = torch.empty_like(turned)
        differentiate = _by_products if angles.length <= _PRODUCTS else _by_kernel
        for here in _pieces(angles, ctx.queries):
            saved = grad[here], turned[here], read[here], normalizer[here], angles.mask[here]
            part = differentiate(*saved, ctx.keys, ctx.scale).transpose(1, 2)
            out[here, :, : -ctx.keys] = angles.turned_back(part[:, :, : -ctx.keys].float(), here)
            out[here, :, -ctx.keys :] = part[:, :, -ctx.keys :]
        return out.flatten(0, 1).flatten(1), None, None, None, None


def _repeated(turned: Tensor, queries: int, keys: int) -> list[Tensor]:
    """Return three times ``[b, queries, L, width]`` from joined heads ``[b, L, queries + 2 * keys, width]``."""
    parts = torch.split(turned.transpose(1, 2), [queries, keys, keys], 1)
    return [part.repeat_interleave(queries // part.shape[1], 1) for part in parts]


def _by_kernel(
    grad: Tensor, turned: Tensor, read: Tensor, normalizer: Tensor, mask: Tensor, keys: int, scale: float
) -> Tensor:
    """Return the gradient of joined heads ``[b, queries + 2 * keys, L, width]``; gradients and ``read`` come so."""
    queries = read.shape[1]
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *_repeated(turned, queries, keys), read, normalizer, 0.0, False, attn_mask=mask, scale=scale
    )
    sums = [part.unflatten(1, (keys, -1)).sum(2) for part in parts[1:]]  # of the queries that share a key
    return torch.cat([parts[0], *sums], 1)


def _by_products(
    grad: Tensor, turned: Tensor, read: Tensor, normalizer: Tensor, mask: Tensor, keys: int, scale: float
) -> Tensor:
    """Do the work of :func:`_by_kernel` in whole matrices: three times as fast for short bins."""
    bins, queries, length, width = read.shape
    by_key = (bins * keys, -1, width)  # the heads that share a key are rows of one product
    query, key, value = (part.reshape(by_key) for part in torch.split(turned.transpose(1, 2), [queries, keys, keys], 1))
    below = grad.reshape(by_key)
    scores = torch.bmm(query.float(), key.float().transpose(1, 2)).view(bins, queries, length, length)
    weights = scores.mul_(scale).sub_(normalizer[..., None]).add_(mask).clamp_(min=_LEAST).exp_()
    change = torch.bmm(below.float(), value.float().transpose(1, 2)).view_as(weights)
    change.sub_((grad.float() * read).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    weights, change = (part.to(turned.dtype).view(bins * keys, -1, length) for part in (weights, change))
    parts = torch.bmm(change, key), torch.bmm(change.transpose(1, 2), query), torch.bmm(weights.transpose(1, 2), below)
    return torch.cat([part.reshape(bins, -1, length, width) for part in parts], 1)


def _pieces(angles: _Angles, heads: int) -> list[slice]:
    """Return slices of bins whose attention scores fit into a core's cache."""
    step = max(1, _SCORES // (heads * angles.length**2))
    return [slice(start, start + step) for start in range(0, angles.bins, step)]
