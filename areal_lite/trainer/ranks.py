"""The processes that train one model together, as torchrun starts them; one process is the case without any.

Sums over ranks are how they agree: every rank holds the whole step's numbers and computes its share.
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
"""A rank that waits so long for another in the midst of a step fails."""

_HEAD_START_S = 2.0
"""A rank that fails keeps its connections so long. Whoever fails because of it waits as well, and so the launcher
meets the first failure first and ends the others. Where all are stopped, the first rank closes its server meanwhile."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among them."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """Return the place in torch's process group, alone where there is none."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add ``tensor`` up over the ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def most(self, count: int, device: torch.device) -> int:
        """Return the largest ``count`` of any rank."""
        if self.size == 1:
            return count
        highest = torch.tensor(count, device=device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return int(highest)


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the ranks that torchrun (or whoever sets RANK, WORLD_SIZE and MASTER_*) started; alone without it.

    An exception is handed to torchrun, which shows the traceback of the first rank that failed and ends the others.

    Args:
        device: What this rank trains on: tensors there travel by NCCL on a GPU (each rank takes the one of its
            LOCAL_RANK), those on the CPU by gloo.
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
        dist.group.WORLD.abort()  # what is under way would keep this rank from leaving
        raise
    finally:
        dist.destroy_process_group()
