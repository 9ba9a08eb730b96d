"""A model sharded over the ranks: each keeps a part of every weight, gradient and optimizer state.

Guarantees that a full weight exists only while its layer computes or while it is written. Knows nothing of losses:
gradients are averaged over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.parallel.shard_loading import fill, is_empty

M = TypeVar("M", bound=Any)


def shard(module: M) -> M:
    """Shard ``module`` in place over the ranks and return it; a single process leaves it unchanged.

    Each layer is gathered while it computes. Weights outside of layers (embeddings, last norm, head) are gathered for
    the whole forward and backward pass of ``module``: only its ``forward`` may use them directly. Call this before
    the optimizer is made. An empty model is filled; with ``sp`` ranks ``module`` reads in parts from then on.
    """
    ranks = Ranks.current()
    if ranks.size > 1:
        mesh = ranks.shard_mesh(ranks.device_type or next(module.parameters()).device.type)
        layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
        for layer in reversed(layers):  # FSDP wants inner modules first
            fully_shard(layer, mesh=mesh)
        # Reshard even after a pass without gradient, so that weights outside of forward are always sharded.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        if is_empty(getattr(module, "model", None)):
            fill(module.model)
            module.examine()
    if ranks.sp > 1:
        module.read_in_parts(ranks)
    return module


def full_tensors(
    tensors: Iterable[tuple[str, Tensor]], owners: Mapping[str, int] | None = None
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the named tensors, gathered one at a time, on their owner, by default rank 0; None on other ranks.

    Every rank must iterate over all of them. Besides their shards, ranks need memory for two tensors.
    """
    rank = Ranks.current().rank
    for name, tensor in tensors:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, full if rank == (owners or {}).get(name, 0) else None


def shared_out(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return an owner for each tensor: the rank that owns the fewest bytes so far."""
    owners, owned = {}, [0] * Ranks.current().size
    for name, tensor in tensors.items():
        owners[name] = owned.index(min(owned))
        owned[owners[name]] += tensor.numel() * tensor.element_size()
    return owners


def shard_like(part: Tensor, full: Tensor) -> Tensor:
    """Shard the replicated tensor ``full`` like ``part``, on its device."""
    full = full.to(part.device)
    if isinstance(part, DTensor):
        return distribute_tensor(full, part.device_mesh, part.placements)
    return full
