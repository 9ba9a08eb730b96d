"""Arithmetic of Llama-like layers beside their matrix products, in C++, with its gradients.

Used in bfloat16 on a CPU where there is a C++ compiler with OpenMP; compiled at the first pass.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from areal_lite.models.kernels.compiler import ARRAY, COUNT, INT, NUMBER, addresses, compile_library
from areal_lite.models.kernels.fused_decoder_operations import DecoderOperations, Tokens

_LONGEST = 8192
"""Longest bin whose attention is computed here; torch's kernel reads keys in blocks and is faster above."""
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
        *((name, ARRAY) for name in ("cos", "sin", "starts", "seen")),
        *((name, COUNT) for name in ("stride", "bins", "heads", "groups", "width")),
        ("scale", NUMBER),
    )

    @classmethod
    def of(cls, tokens: Tokens) -> _Layout:
        queries, keys, width, scale = tokens.heads
        seen, stride = (None, 0) if tokens.seen is None else (*addresses(tokens.seen), tokens.seen.shape[-1])
        arrays = *addresses(tokens.cos, tokens.sin), tokens.starts.ctypes.data, seen
        return cls(*arrays, stride, len(tokens.lengths), keys, queries // keys, width, scale)


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
        out: Tensor = _Gate.apply(joined, self._library)  # type: ignore[no-untyped-call]
        return out

    def attend(self, states: Tensor, tokens: Tokens) -> Tensor:
        """See the base class. Bins that are too long, or too few for all threads, are torch's."""
        pairs = len(tokens.lengths) * tokens.heads.keys  # each thread computes a key head of a bin
        if pairs < torch.get_num_threads() or max(tokens.lengths) > _LONGEST:
            return super().attend(states, tokens)
        read: Tensor = _Attention.apply(states, tokens, self._library)  # type: ignore[no-untyped-call]
        return read
