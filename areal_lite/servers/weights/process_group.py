"""A process group of a trainer, rank 0, and the processes of one inference server, over which weights are broadcast.
The keys in its store are those of SGLang's groups, so that either end may be SGLang."""

from datetime import timedelta
from typing import Any, Literal
import torch.distributed as dist
from torch import Tensor

Backend = Literal["gloo", "nccl"]
JOIN_TIMEOUT_S = 60.0
STALL_S = 5.0  # seconds that the other end may send or take nothing before a broadcast fails
_SLOWEST_BYTES_PER_S = 50e6


def open_store(address: str, port: int, size: int, *, listener: int | None = None) -> Any:
    """Connect to the store at which a group of ``size`` meets; with ``listener``, a bound socket, be that store."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        size,
        is_master=listener is not None,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        wait_for_workers=listener is None,  # only leaves a key, by which the master knows that one has come
        master_listen_fd=listener,
    )


def join_group(name: str, store: Any, *, rank: int, size: int, backend: Backend) -> Any:
    for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
        store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def broadcast(group: Any, tensor: Tensor, *, stall_s: float = STALL_S) -> None:
    """Send ``tensor`` on rank 0, or receive it into ``tensor``; blocks; raises RuntimeError."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=stall_s + tensor.nbytes / _SLOWEST_BYTES_PER_S)
    group.broadcast([tensor], options).wait(options.timeout)
