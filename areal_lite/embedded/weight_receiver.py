"""Receives weights over process groups that trainers open, as SGLang does, but while the model generates.

The methods block: they run in threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_lite.embedded.bad_request import wrong_type
from areal_lite.errors import ServerError
from areal_lite.servers.weights.process_group import broadcast, join_group, open_store

_SILENCE_S = 60.0


class WeightReceiver:
    """The server's process groups, and the tensors of the update that is open."""

    def __init__(self, device: torch.device) -> None:
        self.received: dict[str, Tensor] | None = None
        self.version: str | None = None
        self._device = device
        self._groups: dict[str, tuple[Any, torch.device]] = {}

    def join(self, fields: dict[str, Any]) -> None:
        """Join the group that ``/init_weights_update_group`` describes; raises BadRequest or ServerError."""
        address, name, backend = (_field(fields, key, str) for key in ("master_address", "group_name", "backend"))
        port, rank, size = (_field(fields, key, int) for key in ("master_port", "rank_offset", "world_size"))
        if backend not in ("gloo", "nccl"):
            raise wrong_type(f"backend: Input should be 'gloo' or 'nccl', got {backend!r}.")
        try:
            store = open_store(address, port, size)
            group = join_group(name, store, rank=rank, size=size, backend=backend)
        except RuntimeError as error:
            raise ServerError(f"Failed to initialize custom process group: {error}.") from error
        self._groups = {name: (group, self._device if backend == "nccl" else torch.device("cpu"))}  # the newest only

    def leave(self, name: str) -> None:
        if self._groups.pop(name, None) is None:
            raise ServerError("The group to be destroyed does not exist.")

    def begin(self) -> None:
        if self.received is not None:
            raise ServerError("a weight-update session is already open; call end_weight_update() first")
        self.received, self.version = {}, None

    def receive(self, fields: dict[str, Any]) -> None:
        """Receive the tensors that ``/update_weights_from_distributed`` names, into memory of the CPU."""
        names, dtypes, shapes = (_field(fields, key, list) for key in ("names", "dtypes", "shapes"))
        received, (group, device) = self.received, self._groups.get(_field(fields, "group_name", str), (None, None))
        if received is None:
            raise ServerError("update_weights_from_distributed must run between begin_weight_update() and its end")
        if group is None:
            raise ServerError(f"Group {fields['group_name']} not in {list(self._groups)}")
        try:
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
            }
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise wrong_type(f"names, dtypes and shapes must be lists of one length: {error}") from error
        try:
            for name, tensor in tensors.items():
                broadcast(group, tensor, stall_s=_SILENCE_S)
                received[name] = tensor.cpu()
        except RuntimeError as error:
            self._groups.pop(fields["group_name"], None)
            raise ServerError(f"Failed to receive weights: {error}") from error

    def end(self) -> dict[str, Tensor]:
        if self.received is None:
            raise ServerError("no weight-update session is open; call begin_weight_update() first")
        received, self.received = self.received, None
        return received


def _field(fields: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise wrong_type(f"{name}: Field required, of type {kind.__name__}; got {value!r}.")
    return value
