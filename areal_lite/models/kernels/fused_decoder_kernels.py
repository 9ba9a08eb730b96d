"""Arithmetic of Llama-like layers beside their matrix products, in C++, with its gradients.

Used in bfloat16 on a CPU where there is a C++ compiler with OpenMP; compiled at the first pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from areal_lite.models.kernels.compiler import ARRAY, COUNT, INT, NUMBER, addresses, compile_library
from areal_lite.models.kernels.fused_decoder_operations import DecoderOperations, Tokens

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


@cache
def fused_decoder_operations(dtype: torch.dtype) -> DecoderOperations:
    """Return the compiled operations if they fit the dtype and can be compiled, else torch's."""
    library = None
    if dtype == torch.bfloat16:
        library = compile_library(_SOURCE, _ARGUMENTS, otherwise="training steps take a quarter longer")
    return DecoderOperations() if library is None else CompiledOperations(library)


class _Layout(ctypes.Structure):
    _fields_ = (
        *((name, ARRAY) for name in ("cos", "sin", "bins_segments", "query_ends", "key_ends", "seen")),
        *((name, COUNT) for name in ("bins", "heads", "groups", "width")),
        ("scale", NUMBER),
    )

    @classmethod
    def of(cls, tokens: Tokens) -> _Layout:
        queries, keys, width, scale = tokens.heads
        arrays = *addresses(tokens.cos, tokens.sin), *(part.ctypes.data for part in tokens.layout)
        return cls(*arrays, len(tokens.lengths), keys, queries // keys, width, scale)


class CompiledOperations(DecoderOperations):
    """Reads each bin to its own end."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def add_norm(self, hidden: Tensor, added: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """See the base class."""
        total, normed, inverse = torch.empty_like(hidden), torch.empty_like(added), hidden.new_empty(len(hidden), 1)
        rows, out = addresses(hidden, added, scale), addresses(total, inverse, normed)
        self._library.add_norm(*rows, eps, *hidden.shape, *out, torch.get_num_threads())
        return total, normed, inverse

    def norm_gradient(
        self, grad: Tensor, grad_total: Tensor, total: Tensor, scale: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the base class."""
        grad_total = grad_total.contiguous()
        gradients = torch.empty_like(total), torch.empty_like(grad), torch.empty_like(scale)
        rows = addresses(grad, grad_total, total, scale, inverse)
        self._library.norm_gradient(*rows, *total.shape, *addresses(*gradients), torch.get_num_threads())
        return gradients

    def gate(self, joined: Tensor) -> Tensor:
        """See the base class."""
        rows, width = len(joined), joined.shape[1] // 2
        out = joined.new_empty(rows, width)
        self._library.gate(*addresses(joined), rows, width, *addresses(out), torch.get_num_threads())
        return out

    def gate_gradient(self, grad: Tensor, joined: Tensor) -> Tensor:
        """See the base class."""
        out = torch.empty_like(joined)
        rows = *addresses(grad, joined), *grad.shape
        self._library.gate_gradient(*rows, *addresses(out), torch.get_num_threads())
        return out

    def attend(self, states: Tensor, tokens: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See the base class."""
        if not _fits(tokens):
            return super().attend(states, tokens)
        queries, _, width, _ = tokens.heads
        turned, read = torch.empty_like(states), states.new_empty(len(states), queries * width)
        normalizer = tokens.cos.new_empty(len(states), queries)
        layout = ctypes.byref(_Layout.of(tokens))
        self._library.attend(layout, *addresses(states, turned, read, normalizer), torch.get_num_threads())
        return read, (turned, normalizer)

    def attend_gradient(self, grad: Tensor, tokens: Tokens, read: Tensor, saved: Sequence[Tensor]) -> Tensor:
        """See the base class."""
        if not _fits(tokens):
            return super().attend_gradient(grad, tokens, read, saved)
        turned, normalizer = saved
        out = torch.empty_like(turned)
        layout = ctypes.byref(_Layout.of(tokens))
        rows = addresses(grad, turned, read, normalizer, out)
        self._library.attend_gradient(layout, *rows, torch.get_num_threads())
        return out


def _fits(tokens: Tokens) -> bool:
    """Return whether each thread has a key head of a bin, and no causal bin is too long."""
    pairs = len(tokens.lengths) * tokens.heads.keys
    short = tokens.segments is not None or int(tokens.lengths.max()) <= _LONGEST
    return pairs >= torch.get_num_threads() and short
