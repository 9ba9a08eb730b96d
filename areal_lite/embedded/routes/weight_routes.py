"""New weights and adapters for the served model: from a folder, or broadcast by a trainer.

Guarantees that weights are checked before they are loaded, between two steps, so that every token is computed by whole
weights; a load that fails halfway restores the served ones, if a folder has them.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
import torch
from aiohttp import web
from torch import Tensor
from areal_lite.embedded.bad_request import invalid_value, version_of, wrong_type
from areal_lite.embedded.checked_weights import Checkpoint, check_fit, check_manifest, read_adapter
from areal_lite.embedded.model_thread import ModelThread
from areal_lite.embedded.routes.http_server import fields_of, reply_json
from areal_lite.errors import ConfigError, ServerError
from areal_lite.models.vision_model import own_name
from areal_lite.servers.weights.process_group import broadcast, join_group, open_store

_SILENCE_S = 60.0


class WeightRoutes:
    """Owns the names of the served weights and of the adapter on them."""

    def __init__(self, model: ModelThread, model_path: str) -> None:
        self._model = model
        self._scheduler = model.scheduler
        self._runner = model.scheduler.runner
        self.model_path = model_path  # folder of the served weights; updates change it
        self._can_restore = True  # True while ``model_path`` holds the served weights
        self.adapter: str | None = None  # name of the adapter on the weights
        self._updating = asyncio.Lock()
        self._receiver = WeightReceiver(self._runner.device)

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post("/update_weights_from_disk", self._update_weights)
        receiver = self._receiver
        for path, work, message in (
            ("/init_weights_update_group", receiver.join, "Succeeded to initialize custom process group."),
            ("/destroy_weights_update_group", receiver.leave, "Succeeded to destroy custom process group."),
            ("/begin_weight_update", receiver.begin, "Success"),
            ("/update_weights_from_distributed", receiver.receive, "Succeeded to receive weights."),
        ):
            router.add_post(path, partial(self._in_thread, work, message))
        router.add_post("/end_weight_update", self._end_update)
        router.add_post("/update_weight_version", self._update_version)
        router.add_post("/load_lora_adapter", self._load_adapter)
        router.add_post("/unload_lora_adapter", self._unload_adapter)

    async def _update_version(self, request: web.Request) -> web.Response:
        fields = await fields_of(request)
        version = version_of(fields.get("new_version"))
        if version is None:
            raise wrong_type("new_version: Field required.")

        def change() -> None:
            if fields.get("abort_all_requests", True):
                self._scheduler.abort_all()
            self._scheduler.weight_version = version

        await self._model.command(change)
        return reply_json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def _update_weights(self, request: web.Request) -> web.Response:
        """Check the checkpoint outside the model thread, then load it between two steps."""
        fields = await fields_of(request)
        path, version = _field(fields, "model_path", str), version_of(fields.get("weight_version"))
        async with self._updating:
            checkpoint = await asyncio.to_thread(self._check_checkpoint, path)
            abort_all = fields.get("abort_all_requests") is True
            await self._change_weights(lambda: self._load(checkpoint), version, abort_all=abort_all)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        paused = len(self._scheduler.running) if self._scheduler.paused else 0
        return reply_json({"success": True, "message": message, "num_paused_requests": paused})

    async def _in_thread(
        self, work: Callable[[dict[str, Any]], None], message: str, request: web.Request
    ) -> web.Response:
        await asyncio.to_thread(work, await fields_of(request))
        return reply_json({"success": True, "message": message})

    async def _end_update(self, request: web.Request) -> web.Response:
        """Load the received weights between two steps, if they are complete."""
        await fields_of(request)
        async with self._updating:
            received, version = self._receiver.end(), self._receiver.version
            tensors = {own_name(self._runner.model, name): tensor for name, tensor in received.items()}
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            served, tied = self._runner.weight_shapes()
            check_fit("the broadcast", shapes, served, tied, tensors.__getitem__)

            def load() -> None:
                self._can_restore = False
                self._runner.load_tensors(tensors.items(), shapes)
                self._runner.adapt(None)
                self.adapter = None

            await self._change_weights(load, version)
        return reply_json({"success": True, "message": "Success"})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Put an adapter on the weights, for every request from here on, in place of the one before."""
        fields = await fields_of(request)
        name, path = (_field(fields, key, str) for key in ("lora_name", "lora_path"))
        version = version_of(fields.get("weight_version"))
        async with self._updating:
            adapter = await asyncio.to_thread(read_adapter, path, self._runner.model)
            self.adapter = name  # requests from here on run after the command
            await self._change_weights(lambda: self._runner.adapt(adapter), version)
        return reply_json({"success": True, "loaded_adapters": {name: path}})

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        fields = await fields_of(request)
        name, version = fields.get("lora_name"), version_of(fields.get("weight_version"))
        async with self._updating:
            if name is None or name != self.adapter:
                raise ConfigError(f"LoRA with name {name} does not exist.")
            self.adapter = None
            await self._change_weights(lambda: self._runner.adapt(None), version)
        return reply_json({"success": True, "loaded_adapters": {}})

    async def _change_weights(self, load: Callable[[], None], version: str | None, *, abort_all: bool = False) -> None:
        await self._model.command(lambda: self._scheduler.change_weights(load, version, abort_all=abort_all))

    def check_adapter(self, body: Any) -> None:
        """Refuse a request that names another adapter; its ``submit`` must follow without waiting."""
        wanted = body.get("lora_path") if isinstance(body, dict) else None
        if wanted and wanted != self.adapter:
            raise invalid_value(f"the adapter {wanted!r} is not loaded; the weights have {self.adapter!r}.")

    def _check_checkpoint(self, model_path: str) -> Checkpoint:
        path = Path(model_path).expanduser()
        checkpoint = Checkpoint(path, self._runner.model)
        check_manifest(path)
        check_fit(f"checkpoint {str(path)!r}", checkpoint.shapes, *self._runner.weight_shapes(), checkpoint.read)
        return checkpoint

    def _load(self, checkpoint: Checkpoint) -> None:
        """Load checked weights in place of weights and adapter; if it fails halfway, restore the served ones."""
        runner = self._runner
        try:
            runner.load_tensors(checkpoint.tensors(), checkpoint.shapes)
            runner.adapt(None)
            self.model_path, self._can_restore, self.adapter = str(checkpoint.path), True, None  # also if nobody waits
        except Exception as error:
            if not self._can_restore:
                self._scheduler.weight_version = "mixed"  # no client takes tokens of it
                raise ConfigError(f"loading {str(checkpoint.path)!r} failed ({error}); send weights again.") from error
            served = Checkpoint(Path(self.model_path), runner.model)
            runner.load_tensors(served.tensors(), served.shapes)
            raise ConfigError(
                f"loading {str(checkpoint.path)!r} failed ({error}); the server restored its weights."
            ) from error


class WeightReceiver:
    """The server's process groups, and the tensors of the update that is open. Its methods block: they run in threads.
    Servers receive as SGLang does, but while the model generates."""

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
            group = join_group(name, open_store(address, port, size), rank=rank, size=size, backend=backend)
        except RuntimeError as error:
            raise ServerError(f"Failed to initialize custom process group: {error}.") from error
        self._groups = {name: (group, self._device if backend == "nccl" else torch.device("cpu"))}  # the newest only

    def leave(self, fields: dict[str, Any]) -> None:
        if self._groups.pop(str(fields.get("group_name")), None) is None:
            raise ServerError("The group to be destroyed does not exist.")

    def begin(self, _fields: dict[str, Any]) -> None:
        if self.received is not None:
            raise ServerError("a weight-update session is already open; call end_weight_update() first")
        self.received, self.version = {}, None

    def receive(self, fields: dict[str, Any]) -> None:
        """Receive the tensors that ``/update_weights_from_distributed`` names, into memory of the CPU, while generation
        goes on; ``/end_weight_update`` loads them."""
        version = version_of(fields.get("weight_version"))
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
        if version is not None:
            self.version = version

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
