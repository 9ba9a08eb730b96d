"""The processes that train one model together, as started by torchrun; or a single process.

Ranks agree through sums: every rank holds the numbers of the whole step and computes its share of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another during a step before it fails."""

_HEAD_START_S = 2.0
"""How long a failed rank keeps its connections. Ranks that fail because of it wait as well, so the launcher sees the
first failure first and ends the others. When all ranks are stopped, rank 0 closes its server in this time."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process and the number of ranks."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """Return the rank in torch's process group; rank 0 of 1 without a group."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def most(self, count: int, device: torch.device) -> int:
        """Return the maximum of ``count`` over the ranks."""
        if self.size == 1:
            return count
        highest = torch.tensor(count, device=device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return int(highest)


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the process group of torchrun (or of any launcher that sets RANK, WORLD_SIZE and MASTER_*), if there is one.

    An exception is reported to torchrun, which shows the traceback of the first failed rank and ends the others.

    Args:
        device: The device this rank trains on. GPU tensors use NCCL (each rank takes the GPU of its LOCAL_RANK), CPU
            tensors gloo.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    errors = get_error_handler()
    errors.initialize()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        yield Ranks.current()
    except BaseException as error:
        if isinstance(error, Exception):
            errors.record_exception(error)
        if isinstance(error, Exception) or Ranks.current().rank:
            threading.Event().wait(_HEAD_START_S)
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()  # pending communication would keep this rank from leaving
        raise
    finally:
        dist.destroy_process_group()
