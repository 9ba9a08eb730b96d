"""Sequences divided among ranks: each reads some of the tokens, and attends with some of the heads to all of them.

Guarantees the attention of one rank, whatever its mask: between two exchanges of all with all (Ulysses,
arXiv:2309.14509) a rank has the queries, keys and values of whole sequences. All other layers see tokens one by one.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from areal_lite.errors import ConfigError
from areal_lite.models.parallel.ranks import Ranks


def refuse_heads(heads: int | None, sp_size: int, name: str) -> None:
    """Raise ConfigError if ``sp_size`` ranks cannot divide the attention heads of the model ``name``."""
    if heads is not None and heads % sp_size:
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ConfigError(
            f"trainer.sp_size is {sp_size}, and {name} has {heads} attention heads, which the ranks divide equally: "
            f"use one of {sizes}"
        )


class SequenceParallel:
    """What the ranks that read one sequence together do with each other: sums, and the exchange of tokens for heads
    before attention and back after it. ``B`` rows of ``T`` tokens."""

    def __init__(self, ranks: Ranks, config: Any) -> None:
        refuse_heads(getattr(config, "num_attention_heads", None), ranks.sp, f"this {config.model_type} model")
        self.size, self.rank = ranks.sp, ranks.sp_rank
        self._group: Any = ranks.group("sp")

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks. Each computes the whole loss of it, so its gradient is that of each part."""
        total: Tensor = _Sum.apply(values, self._group)  # type: ignore[no-untyped-call]
        return total

    def to_heads(self, states: Tensor) -> Tensor:
        """Return ``[B, heads / sp, T, width]``, of all tokens, from ``[B, heads, T / sp, width]``. Heads of keys and
        values are repeated where there are too few; a query then still meets its own."""
        repeats = self.size // gcd(self.size, states.shape[1])
        return self._swap(states.repeat_interleave(repeats, 1) if repeats > 1 else states, 1, 2)

    def to_tokens(self, states: Tensor) -> Tensor:
        """Return ``[B, T / sp, heads, width]``, of all heads, from ``[B, T, heads / sp, width]``."""
        return self._swap(states, 1, 2)

    def _swap(self, states: Tensor, split: int, join: int) -> Tensor:
        """Send each rank its part along ``split``, and join what all send along ``join``."""
        sent = torch.stack(states.chunk(self.size, split))
        return torch.cat(all_to_all_single_autograd(sent, None, None, self._group).unbind(), join)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None
