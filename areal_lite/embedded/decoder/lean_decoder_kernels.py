"""Arithmetic of a Llama-like layer between its matrix products, and products of few rows: torch's operations, and C++.

The compiled ones, built when the model is loaded, are used on a CPU with a C++ compiler and OpenMP. torch's pad the
tokens of all slots and read every slot up to the longest one; the compiled ones read each slot up to its own end, and
any number of tokens of it. A product of few rows takes as long as reading the weight, torch's several times that.
"""

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self
import torch
from torch import Tensor
from torch.nn import functional as F
from areal_lite.embedded.decoder.slot_cache import SlotLayer
from areal_lite.models.decoder_family import family_of, fits_kernels, query_key_norms
from areal_lite.models.kernels.compiler import ARRAY, COUNT, INT, NUMBER, addresses, compile_library
from areal_lite.models.policy_model import has_bfloat16
from areal_lite.models.vision_model import text_decoder

_SOURCE = Path(__file__).with_suffix(".cpp")
_ARGUMENTS = {
    "attend": [*[ARRAY] * 5, NUMBER, *[ARRAY] * 4, *[COUNT] * 4, NUMBER, ARRAY, INT],
    "add_norm": [*[ARRAY] * 3, NUMBER, *[COUNT] * 2, ARRAY, INT],
    "gated_silu": [ARRAY, *[COUNT] * 2, ARRAY, INT],
    **dict.fromkeys(("product", "packed_product"), [*[ARRAY] * 3, *[COUNT] * 3, ARRAY, INT]),
}
_MIN_FLOAT32 = 20_000_000  # weights; compiling takes longer than what a smaller model gains in a short run


class Turn(NamedTuple):
    """Rotary angles and mask of a pass."""

    cos: Tensor  # ``[n, q, 1, width]`` of the tokens' rotary angles
    sin: Tensor  # the same; the first half has its sign changed
    mask: Tensor | None  # ``[n, 1, q * groups, kv]`` added to the scores; None if causal

    @classmethod
    def of(cls, angles: tuple[Tensor, Tensor], mask: Tensor | None, groups: int) -> Self:
        """Prepare ``(cos, sin)``, each ``[n, q, width]``, and a mask ``[n, 1, q, kv]`` for all layers."""
        cos, sin = (part[:, :, None] for part in angles)
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return cls(cos.contiguous(), sin, None if mask is None else mask.repeat_interleave(groups, 2))


class LayerOperations:
    """Rounds as the model's own forward does."""

    pads = True  # True if the slots of a pass need equally many tokens

    def __init__(self, model: Any) -> None:
        self._norms_add_one = family_of(text_decoder(model) or model) == "Gemma"

    def attend(self, states: Tensor, attention: Any, cached: SlotLayer, turn: Turn) -> Tensor:
        """Store keys and values, and return what is read ``[n, q, queries * width]``. ``states [n, q, heads, width]``
        are queries, keys, values; ``attention``, the model's own, has sizes and any norms of queries and keys."""
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
            query = query.reshape(*query.shape[:2], kv_heads, groups, -1).transpose(1, 2).flatten(2, 3)
            read = F.scaled_dot_product_attention(query, keys, values, turn.mask, scale=scale)
            read = read.reshape(len(query), kv_heads, -1, groups, read.shape[-1])
        return read.transpose(1, 2).flatten(2)

    def norm(self, hidden: Tensor, norm: Any) -> Tensor:
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

    def product(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of ``[..., width]`` and ``weight`` ``[outs, width]``."""
        return F.linear(states, weight, bias)

    def packs(self, states: Tensor, weight: Tensor) -> bool:
        """Return whether :meth:`packed_product` is faster than :meth:`product`."""
        return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and can_pack()

    def packed(self, weight: Tensor) -> Any:
        """Return a copy of the weight for :meth:`packed_product`."""
        return _reordered(weight)

    def packed_product(self, states: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """Return the :meth:`product` from a packed copy of the weight."""
        return _reordered_product(states, packed, bias)


class CompiledOperations(LayerOperations):
    """Each token is a row of its own, so that a pass needs no padding."""

    pads = False

    def __init__(self, model: Any, library: ctypes.CDLL) -> None:
        super().__init__(model)
        self._library = library
        self._panel = ctypes.c_int.in_dll(library, "panel").value  # outs of a packed part; 0 without such products
        half = has_bfloat16() and model.dtype == torch.bfloat16
        self._most_rows = 4 if half else 32 if model.dtype == torch.float32 else sys.maxsize

    def attend(self, states: Tensor, attention: Any, cached: SlotLayer, turn: Turn) -> Tensor:
        if not cached.is_initialized:
            key_value = states[:, :, : states.shape[2] // (attention.num_key_value_groups + 2)].transpose(1, 2)
            cached.lazy_initialization(key_value, key_value)
        assert cached.keys is not None and cached.values is not None
        (tokens, _, heads, width), (_, kv_heads, capacity, _) = states.shape, cached.keys.shape
        out = states.new_empty(tokens, 1, (heads - 2 * kv_heads) * width)
        norms, sizes = query_key_norms(attention), (tokens, kv_heads, capacity)
        self._library.attend(
            *addresses(states, turn.cos, turn.sin),
            *((None, None) if norms is None else (norm.weight.data_ptr() for norm in norms)),
            0.0 if norms is None else norms[0].variance_epsilon,
            *addresses(cached.keys, cached.values, cached.plan.used, cached.plan.columns),
            *sizes,
            cached.plan.window if cached.is_sliding else capacity,
            *(attention.scaling, out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def add_norm(self, hidden: Tensor, added: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        normed = torch.empty_like(hidden)
        rows, width = hidden.numel() // hidden.shape[-1], hidden.shape[-1]
        eps, threads = norm.variance_epsilon, torch.get_num_threads()
        self._library.add_norm(*addresses(hidden, added, norm.weight), eps, rows, width, normed.data_ptr(), threads)
        return hidden, normed

    def gated(self, joined: Tensor, activation: Any) -> Tensor:
        out = joined.new_empty(*joined.shape[:-1], width := joined.shape[-1] // 2)
        rows, threads = joined.numel() // (2 * width), torch.get_num_threads()
        self._library.gated_silu(joined.data_ptr(), rows, width, out.data_ptr(), threads)
        return out

    def product(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._takes(states, weight):
            return super().product(states, weight, bias)
        return self._computed(self._library.product, states, weight, len(weight), bias)

    def packs(self, states: Tensor, weight: Tensor) -> bool:
        if self._panel:
            return weight.shape[1] % 2 == 0
        return not self._takes(states, weight) and super().packs(states, weight)

    def packed(self, weight: Tensor) -> Any:
        if not self._panel:
            return super().packed(weight)
        padded = F.pad(weight, (0, 0, 0, -len(weight) % self._panel)).view(torch.int32)  # numbers of two columns
        return padded.view(-1, self._panel, padded.shape[1]).transpose(1, 2).contiguous()

    def packed_product(self, states: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        if not self._panel:
            return super().packed_product(states, packed, weight, bias)
        return self._computed(self._library.packed_product, states, packed, len(weight), bias)

    def _takes(self, states: Tensor, weight: Tensor) -> bool:
        """Return whether a product is of few rows, which take as long as reading the weight."""
        width = weight.shape[1]
        return width % 16 == 0 and states.numel() <= self._most_rows * width

    def _computed(self, function: Any, states: Tensor, weight: Tensor, outs: int, bias: Tensor | None) -> Tensor:
        width, rows = states.shape[-1], states.numel() // states.shape[-1]
        out = states.new_empty(*states.shape[:-1], outs)
        bias_at, threads = None if bias is None else bias.data_ptr(), torch.get_num_threads()
        function(*addresses(states, weight), bias_at, rows, width, outs, out.data_ptr(), threads)
        return out


def _reordered(weight: Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _reordered_product(states: Tensor, packed: Tensor, bias: Tensor | None) -> Any:
    return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")


@cache
def can_pack() -> bool:
    """Try the operators for packed weights, which are private to torch: another version may lack or change them."""
    try:
        weight = torch.eye(32, dtype=torch.bfloat16)
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported and torch.equal(_reordered_product(weight, _reordered(weight), None), weight)
    except (AttributeError, RuntimeError, TypeError):
        return False


def lean_decoder_operations(model: Any) -> LayerOperations:
    """Return the compiled operations if they fit the model and can be compiled, else torch's."""
    if model.device.type != "cpu" or not fits_kernels(text_decoder(model) or model):
        return LayerOperations(model)
    if model.dtype != torch.bfloat16 and (model.dtype != torch.float32 or model.num_parameters() < _MIN_FLOAT32):
        return LayerOperations(model)
    return compiled_operations(model)


def compiled_operations(model: Any) -> LayerOperations:
    """Return the compiled operations for a model that they fit, or torch's if they cannot be compiled."""
    attention = (text_decoder(model) or model.model).layers[0].self_attn
    defines = [f"WIDTH={attention.head_dim}", f"GROUPS={attention.num_key_value_groups}"]
    defines += ["FLOAT32=1"] if model.dtype == torch.float32 else []
    library = compile_library(_SOURCE, _ARGUMENTS, *defines, otherwise="decoding takes up to twice as long")
    return LayerOperations(model) if library is None else CompiledOperations(model, library)
