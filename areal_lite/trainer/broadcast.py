"""Sends batches and decisions from the ranks that have them to all ranks.

All ranks make the same calls in the same order. A rank waits while another one generates, and fails if that one
dies. Nothing is pickled.
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

_TIMEOUT = timedelta(days=7)


def broadcast_json(value: Any = None) -> Any:
    """Return rank 0's ``value``, such as whether to stop, after a round trip through JSON; other ranks' is ignored.

    Raises:
        TypeError: If rank 0's value is not JSON-serializable.
    """
    ranks = Ranks.current()
    return orjson.loads(_from_rank(0, orjson.dumps(value if ranks.rank == 0 else None)))


def gather_json(value: Any) -> list[Any]:
    """Return the ``value`` of every rank, in rank order, after a round trip through JSON.

    Raises:
        TypeError: If one is not JSON-serializable.
    """
    own = orjson.dumps(value)
    return [orjson.loads(_from_rank(rank, own)) for rank in range(Ranks.current().size)]


def broadcast_batch(batch: Sequence[Group] | DataProto | None) -> Sequence[Group] | DataProto:
    """Return rank 0's batch; the others give None. Groups reach other ranks as a ``DataProto`` on the CPU.

    Every rank gets the whole batch, a few bytes a token, and computes its share, which depends on all episodes.

    Raises:
        ValueError: If rank 0 passes None, or a value that cannot be stored without pickle.
    """
    if batch is None and Ranks.current().rank == 0:
        raise ValueError("rank 0 passed None as the batch: all ranks train on the batch of rank 0")
    if Ranks.current().size == 1:
        assert batch is not None
        return batch
    if batch is not None and not isinstance(batch, DataProto):
        batch = data_proto_of(batch)
    own = b"" if batch is None else save(to_tensors(batch))
    return from_tensors(load(_from_rank(0, own)))


def _from_rank(source: int, data: bytes) -> bytes:
    """Return the ``data`` of rank ``source``."""
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
    options.timeout = _TIMEOUT
    dist.group.WORLD.broadcast([tensor], options).wait()
