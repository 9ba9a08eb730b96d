"""Published weights as a copy in memory of the first rank, which sends it to servers over process groups.

Each server has a group of its own, so a server that is gone or hangs delays no other. A copy, because training goes on
while servers receive, and one that comes back later gets the same version.
"""

import socket
import time
import uuid
from typing import Any
import torch
from torch.distributed.tensor import DTensor
from areal_lite.models.parallel.sharding import full_tensors
from areal_lite.servers.weights.process_group import JOIN_TIMEOUT_S, Backend, broadcast, join_group, open_store
from areal_lite.servers.weights.published_weights import WeightBroadcast, WeightBucket
from areal_lite.servers.weights.weight_folder import in_parts, sent_weights

MAX_BUCKET_BYTES = 1 << 30  # servers that load tensors as they arrive need this much memory besides their weights
_POLL_S = 0.01


class WeightBroadcaster:
    """Publishes versions of a model's weights. Every rank has one and makes the same calls."""

    def __init__(self, model: Any, *, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self._device: torch.device = next(model.parameters()).device

    def publish(self, version: int) -> WeightBroadcast:
        """Copy the weights, with adapters merged; on other ranks than the first the result is empty."""
        own = {one.data_ptr() for one in self._model.parameters() if not isinstance(one, DTensor)}
        copies = (
            (name, None if tensor is None else tensor.to("cpu", copy=tensor.data_ptr() in own).contiguous())
            for name, tensor in full_tensors(sent_weights(self._model, self._dtype))
        )
        return WeightBroadcast(version, [WeightBucket(part) for part in in_parts(copies, MAX_BUCKET_BYTES)], self)

    def open_group(self, host: str, *, num_ranks: int, device: str | None) -> "BroadcastGroup":
        """Open a group with the ``num_ranks`` processes of the server at ``host``; NCCL if both ends are on GPUs."""
        backend: Backend = "nccl" if self._device.type == "cuda" and device in (None, "cuda") else "gloo"
        return BroadcastGroup(_own_address(host), size=1 + num_ranks, backend=backend, device=self._device)


class BroadcastGroup:
    """The trainer's end, rank 0, of a process group with one server; ``join`` and ``send`` block, from any thread. Each
    of them works on references of its own, so ``close`` frees nothing under a thread that is in a collective."""

    def __init__(self, address: str, *, size: int, backend: Backend, device: torch.device) -> None:
        self.name = f"areal-lite-{uuid.uuid4().hex[:12]}"
        self.master_address = address
        self.size = size
        self.backend = backend
        self._device = device if backend == "nccl" else torch.device("cpu")
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.master_port: int = listener.getsockname()[1]
        self._store: Any = open_store(address, self.master_port, size, listener=listener.detach())
        """None after :meth:`close`, or a broadcast that failed."""
        self._group: Any = None

    @property
    def closed(self) -> bool:
        return self._store is None

    def join(self) -> None:
        """Return once the server's processes have joined; raises OSError."""
        store, deadline = self._store, time.monotonic() + JOIN_TIMEOUT_S
        while not self.closed and not store.num_keys():  # a server writes its first key when it connects
            if time.monotonic() > deadline:
                raise OSError(f"the server did not join the process group in {JOIN_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        if self.closed:
            raise OSError("the process group was closed")
        try:
            self._group = join_group(self.name, store, rank=0, size=self.size, backend=self.backend)
        except RuntimeError as error:
            raise OSError(f"joining the process group failed: {_first_line(error)}") from error

    def send(self, bucket: WeightBucket) -> None:
        for tensor in bucket.tensors.values():
            if (group := self._group) is None or self.closed:
                raise OSError("the process group was closed")
            try:
                broadcast(group, tensor.to(self._device))
            except RuntimeError as error:
                self.close()
                raise OSError(f"the broadcast failed: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave the group; ``join`` and ``send`` in other threads end soon."""
        group, self._group, self._store = self._group, None, None
        if self.backend == "nccl" and group is not None:
            group.abort()


def _own_address(host: str) -> str:
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
