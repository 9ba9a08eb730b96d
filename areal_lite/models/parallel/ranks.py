"""The processes that train one model together, as started by torchrun; or a single process.

Ranks agree through sums: every rank holds the numbers of the whole step and computes its share. Batches and decisions
are broadcast: all ranks make the same calls in the same order, and fail if the sending rank dies. Nothing is pickled.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
import orjson
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from areal_lite.api.trajectory import Group
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.data_proto_file import from_tensors, to_tensors
from areal_lite.data.batch.training_batch import data_proto_of
from areal_lite.errors import ConfigError

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # of torchrun
_TIMEOUT = timedelta(minutes=10)  # how long a rank waits for another during a step before it fails
_HEAD_START_S = 2.0
"""How long a failed rank keeps its connections. Ranks that fail because of it wait as well, so the launcher sees the
first failure first and ends the others. When all ranks are stopped, rank 0 closes its server in this time."""
_BROADCAST_TIMEOUT = timedelta(days=7)  # a rank waits while another one generates


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process in a mesh of ``dp x sp x tp`` ranks; owner of every size and process group of it.

    The ranks with one ``dp_rank``, whose numbers are next to each other, read the same sequences together, and hold the
    same values of their tokens: ``sp`` parts of the tokens, and of each part ``tp`` shares of every layer. Ranks with
    another ``dp_rank`` have other sequences. All share the weights.
    """

    rank: int = 0
    size: int = 1
    sp: int = 1
    tp: int = 1
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    """With the dimensions ``dp``, ``sp`` and ``tp``; None if there are only ``dp`` ranks."""
    device_type: str | None = field(default=None, compare=False)  # of the weights

    @classmethod
    def current(cls) -> "Ranks":
        """Return the ranks of :func:`join_ranks`; without it those of torch's process group, or rank 0 of 1."""
        if _joined:
            return _joined[-1]
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @property
    def dp(self) -> int:
        """Shares of the sequences."""
        return self.shards // self.sp

    @property
    def shards(self) -> int:
        """Ranks over which a weight, or the part of it that ``tp`` leaves, is sharded: ``dp * sp``."""
        return self.size // self.tp

    @property
    def dp_rank(self) -> int:
        """The share of this rank."""
        return self.rank // (self.sp * self.tp)

    @property
    def sp_rank(self) -> int:
        """The part of each sequence that this rank reads."""
        return self.rank // self.tp % self.sp

    @property
    def tp_rank(self) -> int:
        """The part of each layer that this rank computes."""
        return self.rank % self.tp

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """Return the ranks that differ from this one in ``dp``, ``sp`` or ``tp`` alone; None for all ranks."""
        return None if self.mesh is None else self.mesh.get_group(dimension)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the shares of the sequences in place, and return it."""
        if self.dp > 1:
            dist.all_reduce(tensor, group=self.group("dp"))
        return tensor

    def most(self, count: int, device: torch.device) -> int:
        """Return the maximum of ``count`` over the shares of the sequences."""
        if self.dp == 1:
            return count
        highest = torch.tensor(count, device=device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group("dp"))
        return int(highest)


_joined: list[Ranks] = []


@contextmanager
def join_ranks(device: torch.device, *, sp_size: int = 1, tp_size: int = 1) -> Iterator[Ranks]:
    """Join the process group of torchrun (or of any launcher that sets RANK, WORLD_SIZE and MASTER_*), if there is one.

    An exception is reported to torchrun, which shows the traceback of the first failed rank and ends the others.

    Args:
        device: This rank's device. GPU tensors use NCCL (each rank takes the GPU of its LOCAL_RANK), CPU tensors gloo.
        sp_size: Ranks that read one sequence together.
        tp_size: Ranks that compute one layer together.

    Raises:
        ConfigError: If ``sp_size * tp_size`` does not divide the number of ranks.
    """
    size, together = int(os.environ.get("WORLD_SIZE", "1")), sp_size * tp_size
    if size % together:
        raise ConfigError(
            f"trainer.sp_size is {sp_size}, tp_size {tp_size}, and there are {size} ranks: start a multiple of "
            f"{together} with torchrun --nproc-per-node, or set trainer.sp_size: 1 and tp_size: 1"
        )
    if size == 1:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    errors = get_error_handler()
    errors.initialize()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        ranks, mesh = Ranks.current(), None
        if together > 1:
            shape = size // together, sp_size, tp_size
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "sp", "tp"))
        _joined.append(replace(ranks, sp=sp_size, tp=tp_size, mesh=mesh, device_type=device.type))
        yield _joined[-1]
    except BaseException as error:
        if isinstance(error, Exception):
            _report(errors, error)
        if isinstance(error, Exception) or Ranks.current().rank:
            threading.Event().wait(_HEAD_START_S)
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()  # pending communication would keep this rank from leaving
        raise
    finally:
        _joined.clear()
        dist.destroy_process_group()


def _report(errors: Any, error: Exception) -> None:
    """Give torchrun the error whole or not at all: it may end this rank, and read the file, while that is written."""
    if (place := os.environ.get(_ERROR_FILE)) is None:
        return
    os.environ[_ERROR_FILE] = part = f"{place}.part"
    errors.record_exception(error)
    Path(part).replace(place)


def broadcast_json(value: Any = None) -> Any:
    """Return rank 0's ``value``, such as whether to stop, after a round trip through JSON; other ranks' is ignored."""
    return orjson.loads(_from_rank(0, orjson.dumps(value)))


def gather_json(value: Any) -> list[Any]:
    """Return the ``value`` of every rank, in rank order, after a round trip through JSON."""
    own = orjson.dumps(value)
    return [orjson.loads(_from_rank(rank, own)) for rank in range(Ranks.current().size)]


def broadcast_batch(batch: Sequence[Group] | DataProto | None) -> Sequence[Group] | DataProto:
    """Return rank 0's batch; the others give None. Groups reach other ranks as a ``DataProto`` on the CPU. Every rank
    gets the whole batch, a few bytes a token, and computes its share, which depends on all episodes. Raises ValueError
    if rank 0 passes None, or a value that cannot be stored without pickle."""
    if batch is None and Ranks.current().rank == 0:
        raise ValueError("rank 0 passed None as the batch: all ranks train on the batch of rank 0")
    if Ranks.current().size == 1:
        assert batch is not None
        return batch
    if batch is not None and not isinstance(batch, DataProto):
        batch = data_proto_of(batch)
    return from_tensors(load(_from_rank(0, b"" if batch is None else save(to_tensors(batch)))))


def _from_rank(source: int, data: bytes) -> bytes:
    ranks = Ranks.current()
    if ranks.size == 1:
        return data
    assert dist.group.WORLD is not None
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = source, _BROADCAST_TIMEOUT
    length = torch.tensor(len(data))
    dist.group.WORLD.broadcast([length], options).wait()
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if ranks.rank == source:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.group.WORLD.broadcast([buffer], options).wait()
    return buffer.numpy().tobytes()
