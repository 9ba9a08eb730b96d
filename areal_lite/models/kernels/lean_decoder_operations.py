"""Arithmetic of a Llama-like layer between its matrix products, with torch's operations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from areal_lite.models.decoder_family import family_of, query_key_norms
from areal_lite.models.slot_cache import SlotLayer


class Turn(NamedTuple):
    """Rotary angles and mask of a pass."""

    cos: Tensor
    """``[n, q, 1, width]`` of the tokens' rotary angles."""
    sin: Tensor
    """The same; the first half has its sign changed."""
    mask: Tensor | None
    """``[n, 1, q * groups, kv]`` added to the scores; None if causal."""

    @classmethod
    def of(cls, angles: tuple[Tensor, Tensor], mask: Tensor | None, groups: int) -> Turn:
        """Prepare ``(cos, sin)``, each ``[n, q, width]``, and a mask ``[n, 1, q, kv]`` for all layers."""
        cos, sin = (part[:, :, None] for part in angles)
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return cls(cos.contiguous(), sin, None if mask is None else mask.repeat_interleave(groups, 2))


class LayerOperations:
    """Rounds as the model's own forward does."""

    pads = True
    """True if the slots of a pass need equally many tokens."""

    def __init__(self, model: Any) -> None:
        family = family_of(model)
        self._norms_add_one = family is not None and family.norms_add_one

    def attend(self, states: Tensor, attention: Any, cached: SlotLayer, turn: Turn) -> Tensor:
        """Store keys and values, and return what is read ``[n, q, queries * width]``.

        Args:
            states: ``[n, q, heads, width]``: queries, keys, values.
            attention: The model's own, for its sizes and its norms of queries and keys, if any.
            cached: Earlier tokens.
        """
        groups, half = attention.num_key_value_groups, states.shape[-1] // 2
        kv_heads = states.shape[2] // (groups + 2)
        value = states[:, :, -kv_heads:]
        if (norms := query_key_norms(attention)) is not None:
            query, key = states[:, :, : -2 * kv_heads], states[:, :, -2 * kv_heads : -kv_heads]
            states = torch.cat([norms[0](query), norms[1](key)], 2)
        else:
            states = states[:, :, :-kv_heads]
        states = (states * turn.cos).add_(states.roll(half, -1).mul_(turn.sin))
        query, key = states[:, :, :-kv_heads], states[:, :, -kv_heads:]
        keys, values = cached.update(key.transpose(1, 2), value.transpose(1, 2))
        scale = attention.scaling
        if turn.mask is None:
            query = query.transpose(1, 2)
            read = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        else:  # the heads that share a key are queries of one head, so no key is copied
            shape = query.shape
            query = query.reshape(*shape[:2], kv_heads, groups, -1).transpose(1, 2).flatten(2, 3)
            read = F.scaled_dot_product_attention(query, keys, values, turn.mask, scale=scale)
            read = read.reshape(len(query), kv_heads, -1, groups, read.shape[-1])
        return read.transpose(1, 2).flatten(2)

    def norm(self, hidden: Tensor, norm: Any) -> Tensor:
        """Return the RMS norm."""
        if self._norms_add_one:
            scaled: Tensor = norm(hidden)
            return scaled
        return F.rms_norm(hidden, hidden.shape[-1:], None, norm.variance_epsilon).mul_(norm.weight)

    def add_norm(self, hidden: Tensor, added: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """Add to ``hidden`` in place, and return it and its RMS norm."""
        hidden.add_(added)
        return hidden, self.norm(hidden, norm)

    def gated(self, joined: Tensor, activation: Any) -> Tensor:
        """Return ``activation(gate) * up`` of joined ``[..., 2 * width]``."""
        gate, up = joined.chunk(2, -1)
        active: Tensor = activation(gate)
        return active.mul_(up)

    def takes(self, states: Tensor, weight: Tensor) -> bool:
        """Return whether :meth:`product` is faster than any of torch's."""
        return False

    def product(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of ``[..., width]`` and ``weight`` ``[outs, width]``."""
        return F.linear(states, weight, bias)
