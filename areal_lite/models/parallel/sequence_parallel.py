"""Sequences divided among ranks: each reads some of the tokens, and attends with some of the heads to all of them.

Guarantees the attention of one rank, whatever its mask: between two exchanges of all with all (Ulysses,
arXiv:2309.14509) a rank has the queries, keys and values of whole sequences. All other layers see tokens one by one.
"""

from math import gcd
from typing import Any
import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from areal_lite.errors import ConfigError
from areal_lite.models.parallel.ranks import Ranks


def refuse_heads(heads: int | None, sp_size: int, tp_size: int, name: str) -> None:
    """Raise ConfigError if ``sp_size`` ranks cannot divide the heads that ``tp_size`` leaves each of model ``name``."""
    if heads is not None and heads % (sp_size * tp_size):
        left = heads // tp_size
        sizes = ", ".join(str(size) for size in range(1, left + 1) if left % size == 0)
        raise ConfigError(
            f"trainer.sp_size is {sp_size}, tp_size {tp_size}, and {name} has {heads} attention heads, which the ranks "
            f"divide equally: use one of {sizes} as sp_size"
        )


class SequenceParallel:
    """Exchanges tokens for heads around attention, among the ranks of one sequence. ``B`` rows of ``T`` tokens."""

    def __init__(self, ranks: Ranks, config: Any) -> None:
        heads = getattr(config, "num_attention_heads", None)
        refuse_heads(heads, ranks.sp, ranks.tp, f"this {config.model_type} model")
        self.size, self.rank = ranks.sp, ranks.sp_rank
        self.group: Any = ranks.group("sp")

    def to_heads(self, states: Tensor) -> Tensor:
        """Return ``[B, heads / sp, T, width]``, of all tokens, from ``[B, heads, T / sp, width]``. Heads of keys and
        values are repeated where there are too few; a query then still meets its own."""
        repeats = self.size // gcd(self.size, states.shape[1])
        return self.to_tokens(states.repeat_interleave(repeats, 1) if repeats > 1 else states)  # by the same exchange

    def to_tokens(self, states: Tensor) -> Tensor:
        """Return ``[B, T / sp, heads, width]``, of all heads, from ``[B, T, heads / sp, width]``."""
        sent = torch.stack(states.chunk(self.size, 1))  # each rank gets its part
        return torch.cat(all_to_all_single_autograd(sent, None, None, self.group).unbind(), 2)
