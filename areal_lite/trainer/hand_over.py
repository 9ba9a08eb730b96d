"""Batches and decisions that some ranks have and all need: after each call, every rank holds the same.

All ranks make the same calls in the same order. A rank waits for as long as another generates, and fails
where that other is gone. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import orjson
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F

from areal_lite.data.data_proto import DataProto
from areal_lite.data.data_proto_file import from_tensors, to_tensors
from areal_lite.trainer.ranks import Ranks

_PATIENCE = timedelta(days=7)


def broadcast_json(value: Any = None) -> Any:
    """Return rank 0's ``value`` as JSON gives it back: whether to stop, say; what the others give is not read.

    Raises:
        TypeError: If rank 0's is not made of JSON's types.
    """
    ranks = Ranks.current()
    return orjson.loads(_from_rank(0, orjson.dumps(value if ranks.rank == 0 else None)))


def gather_json(value: Any) -> list[Any]:
    """Return every rank's ``value``, rank by rank, as JSON gives it back.

    Raises:
        TypeError: If one is not made of JSON's types.
    """
    own = orjson.dumps(value)
    return [orjson.loads(_from_rank(rank, own)) for rank in range(Ranks.current().size)]


def broadcast_batch(batch: DataProto | None) -> DataProto:
    """Return rank 0's batch, on the CPU; the others give None.

    Raises:
        ValueError: If rank 0 gives None, or a value that cannot be kept without pickle.
    """
    if batch is None and Ranks.current().rank == 0:
        raise ValueError("rank 0 gives None for a batch: it is the rank whose batch all others get")
    return _from_bytes(_from_rank(0, _to_bytes(batch)))


def gather_batches(batch: DataProto | None) -> DataProto:
    """Return the rows of all ranks, those of rank 0 first, on the CPU; a rank without rows gives None.

    Columns whose second dimension differs are padded with zeros on the right, as their masks are.

    Raises:
        ValueError: If no rank has rows, their batches do not fit together (:meth:`DataProto.concat`), or a value cannot
            be kept without pickle.
    """
    own = _to_bytes(batch)
    parts = [_from_bytes(_from_rank(rank, own)) for rank in range(Ranks.current().size)]
    parts = [part for part in parts if len(part)]
    widths: dict[str, int] = {}
    for key, column in _matrices(parts):
        widths[key] = max(column.shape[1], widths.get(key, 0))
    for part in parts:
        for key, column in _matrices([part]):
            part.batch[key] = F.pad(column, (0, widths[key] - column.shape[1]))
    return DataProto.concat(parts)


def _matrices(parts: Iterable[DataProto]) -> list[tuple[str, Tensor]]:
    return [(key, column) for part in parts for key, column in part.batch.items() if column.ndim == 2]


def _to_bytes(batch: DataProto | None) -> bytes:
    return save(to_tensors(DataProto() if batch is None else batch))


def _from_bytes(data: bytes) -> DataProto:
    return from_tensors(load(data))


def _from_rank(source: int, data: bytes) -> bytes:
    """Return what rank ``source`` gives as ``data``; it is not empty."""
    ranks = Ranks.current()
    if ranks.size == 1:
        return data
    length = torch.tensor(len(data))
    _broadcast(length, source)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if ranks.rank == source:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    _broadcast(buffer, source)
    return buffer.numpy().tobytes()


def _broadcast(tensor: Tensor, source: int) -> None:
    assert dist.group.WORLD is not None
    options = dist.BroadcastOptions()
    options.rootRank = source
    options.timeout = _PATIENCE
    dist.group.WORLD.broadcast([tensor], options).wait()
