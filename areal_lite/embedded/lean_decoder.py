"""The forward pass of a Llama-like model, without the overhead of its modules.

Projections of one input are one product, shared keys are not copied, and nothing but tensors is called. Rounds as the
model's own forward does. Shares the model's weights; in bfloat16 on a CPU it also keeps a packed copy of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areal_lite.embedded.slot_cache import SlotCache, SlotLayer

FAMILIES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM"}
)
"""Classes whose layers have this form; other models run their own forward."""


class _Linear:
    """A product with a weight; in bfloat16 on a CPU with a packed copy, which gives the same bits in less time."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        half = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        self._packs = half and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]
        self.packed: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        if not self._packs:
            return F.linear(states, self._weight, self._bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self._weight)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(states, self.packed, self._bias, "none", [], "")
        return product


class _Layer(NamedTuple):
    attention: Any
    """The model's own, for its norms of queries and keys, if any."""
    input_norm: nn.Module
    qkv: _Linear
    output: _Linear
    mlp_norm: nn.Module
    gate_up: _Linear
    down: _Linear
    activation: nn.Module


class LeanDecoder:
    """Computes logits with a cache.

    Args:
        model: Of one of the ``FAMILIES``; its projections of one input become views of a joined weight.
        cache: Holds the keys and values of earlier tokens.
    """

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self._cache = cache
        self._body = model.model
        self._head = _joined(model.get_output_embeddings())
        self._layers = [_lean(layer) for layer in self._body.layers]
        self._one_is_added = "Gemma" in type(model).__name__  # to the weight of each norm

    def weights_changed(self) -> None:
        """Drop the packed copies; the next pass makes new ones."""
        for linear in (self._head, *(part for layer in self._layers for part in layer if isinstance(part, _Linear))):
            linear.packed = None

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, last: Tensor | None) -> Tensor:
        """Run a pass that the cache's plan describes, and store its KV.

        Args:
            ids: ``[n, q]`` token ids.
            positions: ``[n, q]`` their positions.
            mask: ``[n, 1, q, kv]`` added to the attention's scores; None if no slot has earlier tokens.
            last: ``[n]`` the place in ``q`` of the only token of each slot that needs logits; None for all.

        Returns:
            ``[n, vocab]`` logits with ``last``, else ``[n, q, vocab]``.
        """
        hidden = self._body.embed_tokens(ids)
        cos, sin = (part[:, :, None] for part in self._body.rotary_emb(hidden, positions))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)  # the turned half changes its sign
        groups = self._layers[0].attention.num_key_value_groups
        if mask is not None:
            mask = mask.repeat_interleave(groups, 2)
        for layer, cached in zip(self._layers, self._cache.layers, strict=True):
            assert isinstance(cached, SlotLayer)
            states = layer.qkv(self._norm(layer.input_norm, hidden)).view(*ids.shape, -1, layer.attention.head_dim)
            kv_heads = states.shape[2] // (groups + 2)
            value = states[:, :, -kv_heads:]
            if hasattr(layer.attention, "q_norm"):
                query, key = states[:, :, : -2 * kv_heads], states[:, :, -2 * kv_heads : -kv_heads]
                states = torch.cat([layer.attention.q_norm(query), layer.attention.k_norm(key)], 2)
            else:
                states = states[:, :, :-kv_heads]
            states = (states * cos).add_(states.roll(half, -1).mul_(sin))
            query, key = states[:, :, :-kv_heads], states[:, :, -kv_heads:]
            keys, values = cached.update(key.transpose(1, 2), value.transpose(1, 2))
            scale = layer.attention.scaling
            if mask is None:
                query = query.transpose(1, 2)
                read = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)
            else:  # the heads that share a key are queries of one head, so no key is copied
                query = query.reshape(*ids.shape, kv_heads, groups, -1).transpose(1, 2).flatten(2, 3)
                read = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale)
                read = read.reshape(len(ids), kv_heads, -1, groups, read.shape[-1])
            hidden = layer.output(read.transpose(1, 2).flatten(2)).add_(hidden)
            gate, up = layer.gate_up(self._norm(layer.mlp_norm, hidden)).chunk(2, -1)
            hidden = layer.down(layer.activation(gate).mul_(up)).add_(hidden)
        if last is not None:
            hidden = hidden[torch.arange(len(last), device=last.device), last]
        logits: Tensor = self._head(self._norm(self._body.norm, hidden))
        return logits

    def _norm(self, norm: Any, hidden: Tensor) -> Tensor:
        if self._one_is_added:
            scaled: Tensor = norm(hidden)
            return scaled
        return F.rms_norm(hidden, hidden.shape[-1:], None, norm.variance_epsilon).mul_(norm.weight)


def _lean(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        attention=attention,
        input_norm=layer.input_layernorm,
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        output=_joined(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm,
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=_joined(mlp.down_proj),
        activation=mlp.act_fn,
    )


def _joined(*linears: nn.Linear) -> _Linear:
    """Return weight and bias of one product in place of several, of which they become views."""
    if len(linears) == 1:
        return _Linear(linears[0].weight, linears[0].bias)
    sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(linears, torch.split(weight, sizes), strict=True):
        linear.weight.data = part
    if linears[0].bias is None:
        return _Linear(weight, None)
    bias = torch.cat([linear.bias for linear in linears])
    for linear, part in zip(linears, torch.split(bias, sizes), strict=True):
        linear.bias.data = part
    return _Linear(weight, bias)
