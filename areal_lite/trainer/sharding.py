"""A model divided among the ranks: each keeps a part of every weight, its gradient and its optimizer state.

Guarantees that the whole of a weight exists only while its layer computes, or while it is written. Knows
nothing of losses: gradients come out averaged over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from areal_lite.trainer.ranks import Ranks

M = TypeVar("M", bound=nn.Module)


def shard(module: M) -> M:
    """Divide ``module`` in place among the ranks and return it; alone, it stays as it is.

    Each layer is gathered while it computes. What is in no layer (embeddings, last norm, head) is gathered for the
    whole of ``module``'s forward and backward pass, so its ``forward`` may use these weights directly, and no other
    method may. To be called before the optimizer is made.
    """
    ranks = Ranks.current()
    if ranks.size > 1:
        mesh = init_device_mesh(next(module.parameters()).device.type, (ranks.size,))
        layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
        for layer in reversed(layers):  # FSDP wants inner modules first
            fully_shard(layer, mesh=mesh)
        # Resharded even after a pass without gradient: nothing but weights in parts is ever seen outside of forward.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return module


def full_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the named tensors whole, one at a time, on rank 0, and None in their place on the others.

    Every rank must go through all of them. Beyond what they share, ranks need memory for two of them.
    """
    first = Ranks.current().rank == 0
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, whole if first else None


def divided_like(part: Tensor, whole: Tensor) -> Tensor:
    """Return ``whole``, of which every rank has the same, on ``part``'s device and divided among the ranks as it is."""
    whole = whole.to(part.device)
    if isinstance(part, DTensor):
        return distribute_tensor(whole, part.device_mesh, part.placements)
    return whole
