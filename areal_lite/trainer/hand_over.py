"""Batches and decisions that some ranks have and all need: after each call, every rank holds the same.

All ranks make the same calls in the same order. A rank waits for as long as another generates, and fails
where that other is gone. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import orjson
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from areal_lite.api.trajectory import Group
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.data_proto_file import from_tensors, to_tensors
from areal_lite.data.batch.training_batch import data_proto_of
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


def broadcast_batch(batch: Sequence[Group] | DataProto | None) -> Sequence[Group] | DataProto:
    """Return rank 0's batch; the others give None. Groups reach other ranks as a ``DataProto`` on the CPU.

    Every rank gets the whole of it, a few bytes a token, and then computes its share: which samples these are depends
    on all of them.

    Raises:
        ValueError: If rank 0 gives None, or a value that cannot be kept without pickle.
    """
    if batch is None and Ranks.current().rank == 0:
        raise ValueError("rank 0 gives None for a batch: it is the rank whose batch all others get")
    if Ranks.current().size == 1:
        assert batch is not None
        return batch
    if batch is not None and not isinstance(batch, DataProto):
        batch = data_proto_of(batch)
    own = b"" if batch is None else save(to_tensors(batch))
    return from_tensors(load(_from_rank(0, own)))


def _from_rank(source: int, data: bytes) -> bytes:
    """Return what rank ``source`` gives as ``data``."""
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
