"""One decode step of a Llama-like model, without the overhead of its modules.

Projections of one input are one product, shared keys are not copied, and nothing but tensors is called. Rounds as the
model's own forward does. Shares the model's weights, so an update in place reaches both.
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
"""Classes whose layers have this form; other models decode with their own forward."""


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None


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
    """Computes the next logits of each slot from one new token.

    Args:
        model: Of one of the ``FAMILIES``; its projections of one input become views of a joined weight.
        cache: Holds the keys and values before the token.
    """

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self._cache = cache
        self._body = model.model
        self._head = model.get_output_embeddings()
        self._layers = [_lean(layer) for layer in self._body.layers]
        self._one_is_added = "Gemma" in type(model).__name__  # to the weight of each norm

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run a pass that the cache's plan describes, and store its KV.

        Args:
            ids: ``[n, 1]`` token ids.
            positions: ``[n, 1]`` their positions.
            mask: ``[n, 1, 1, kv]`` added to the attention's scores.

        Returns:
            ``[n, vocab]`` logits.
        """
        plan = self._cache.plan
        hidden = self._body.embed_tokens(ids)
        cos, sin = (part.transpose(0, 1)[0][:, None] for part in self._body.rotary_emb(hidden, positions))
        hidden = hidden[:, 0]
        where = slice(len(ids)) if plan.leading else plan.used
        rows: Tensor | None = None
        for layer, cached in zip(self._layers, self._cache.layers, strict=True):
            assert isinstance(cached, SlotLayer)
            keys, values = cached.keys, cached.values
            assert keys is not None and values is not None
            kv_heads, columns, width = keys.shape[1:]
            if rows is None:  # of keys and values as one list of heads
                heads = plan.used[:, None] * kv_heads + torch.arange(kv_heads, device=ids.device)
                rows = (heads * columns + plan.columns).flatten()
            states = F.linear(self._norm(layer.input_norm, hidden), *layer.qkv).view(len(ids), -1, width)
            query, key, value = torch.split(states, [states.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
            if hasattr(layer.attention, "q_norm"):
                states = torch.cat([layer.attention.q_norm(query), layer.attention.k_norm(key)], 1)
            else:
                states = states[:, :-kv_heads]
            states = states * cos + _half_turned(states) * sin
            query, key = states[:, :-kv_heads], states[:, -kv_heads:]
            for stored, new in ((keys, key), (values, value)):
                stored.view(-1, width).index_copy_(0, rows, new.reshape(-1, width))
            # The heads that share a key are queries of one head, so no key is copied.
            query = query.reshape(len(ids), kv_heads, -1, width)
            seen, weighed = keys[where, :, : plan.kv_length], values[where, :, : plan.kv_length]
            read = F.scaled_dot_product_attention(query, seen, weighed, mask, scale=layer.attention.scaling)
            hidden = hidden + F.linear(read.reshape(len(ids), -1), *layer.output)
            gate, up = F.linear(self._norm(layer.mlp_norm, hidden), *layer.gate_up).chunk(2, -1)
            hidden = hidden + F.linear(layer.activation(gate) * up, *layer.down)
        logits: Tensor = self._head(self._norm(self._body.norm, hidden))
        return logits

    def _norm(self, norm: Any, hidden: Tensor) -> Tensor:
        if self._one_is_added:
            scaled: Tensor = norm(hidden)
            return scaled
        return F.rms_norm(hidden, hidden.shape[-1:], None, norm.variance_epsilon).mul_(norm.weight)


def _half_turned(states: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return torch.cat([-second, first], -1)


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
