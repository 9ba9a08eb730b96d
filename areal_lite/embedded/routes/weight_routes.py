"""New weights and adapters for the served model: from a folder, or broadcast by a trainer.

Guarantees that weights are checked before they are loaded, between two steps, so that every token is computed by whole
weights; a load that fails halfway restores the served ones, if a folder has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from areal_lite.embedded.adapter import Adapter, read_adapter
from areal_lite.embedded.bad_request import invalid_value, wrong_type
from areal_lite.embedded.checked_weights import Checkpoint, check_manifest, check_shapes, check_tied
from areal_lite.embedded.model_thread import ModelThread
from areal_lite.embedded.routes.http_server import failure, fields_of, reply_json, version_of
from areal_lite.embedded.weight_receiver import WeightReceiver
from areal_lite.errors import ArealLiteError, ConfigError
from areal_lite.models.vision_model import own_name


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
        router.add_post("/init_weights_update_group", self._join_group)
        router.add_post("/destroy_weights_update_group", self._leave_group)
        router.add_post("/begin_weight_update", self._begin_update)
        router.add_post("/update_weights_from_distributed", self._receive_weights)
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
        message = f"Weight version updated to {version}"
        return reply_json({"success": True, "message": message, "new_version": version})

    async def _update_weights(self, request: web.Request) -> web.Response:
        """Check the checkpoint outside the model thread, then load it between two steps."""
        fields = await fields_of(request)
        path, version = fields.get("model_path"), version_of(fields.get("weight_version"))
        if not isinstance(path, str):
            raise wrong_type(f"model_path: Field required, a string; got {path!r}.")
        async with self._updating:
            try:
                checkpoint = await asyncio.to_thread(self._check_checkpoint, path)
                await self._model.command(
                    lambda: self._scheduler.change_weights(
                        lambda: self._load(checkpoint), version, abort_all=fields.get("abort_all_requests") is True
                    )
                )
            except (ArealLiteError, OSError) as error:
                return failure(error, num_paused_requests=0)
            self.model_path, self._can_restore, self.adapter = path, True, None
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        paused = len(self._scheduler.running) if self._scheduler.paused else 0
        return reply_json({"success": True, "message": message, "num_paused_requests": paused})

    async def _join_group(self, request: web.Request) -> web.Response:
        fields = await fields_of(request)
        message = "Succeeded to initialize custom process group."
        return await self._in_update(lambda: self._receiver.join(fields), message)

    async def _leave_group(self, request: web.Request) -> web.Response:
        name = str((await fields_of(request)).get("group_name"))
        return await self._in_update(lambda: self._receiver.leave(name), "Succeeded to destroy custom process group.")

    async def _begin_update(self, request: web.Request) -> web.Response:
        await fields_of(request)
        return await self._in_update(self._receiver.begin, "Success")

    async def _receive_weights(self, request: web.Request) -> web.Response:
        """Receive weights while generation goes on; ``/end_weight_update`` loads them."""
        fields = await fields_of(request)
        version = version_of(fields.get("weight_version"))
        answer = await self._in_update(lambda: self._receiver.receive(fields), "Succeeded to receive weights.")
        if version is not None:
            self._receiver.version = version
        return answer

    async def _end_update(self, request: web.Request) -> web.Response:
        """Load the received weights between two steps, if they are complete."""
        await fields_of(request)
        async with self._updating:
            try:
                received, version = self._receiver.end(), self._receiver.version
                tensors = {own_name(self._runner.model, name): tensor for name, tensor in received.items()}
                shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                served, tied = self._runner.weight_shapes()
                check_shapes("the broadcast", shapes, served, tied)
                check_tied("the broadcast", shapes, tied, lambda a, b: torch.equal(tensors[a], tensors[b]))

                def load() -> None:
                    self._can_restore = False
                    self._runner.load_tensors(tensors.items(), shapes)
                    self._runner.adapt(None)

                await self._model.command(lambda: self._scheduler.change_weights(load, version, abort_all=False))
                self.adapter = None
            except ArealLiteError as error:
                return failure(error)
        return reply_json({"success": True, "message": "Success"})

    async def _in_update(self, work: Callable[[], None], message: str) -> web.Response:
        """Run ``work`` in a thread; a failure is SGLang's answer with status 400."""
        try:
            await asyncio.to_thread(work)
        except ArealLiteError as error:
            return failure(error)
        return reply_json({"success": True, "message": message})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Put an adapter on the weights, for every request from here on, in place of the one before."""
        fields = await fields_of(request)
        name, path, version = fields.get("lora_name"), fields.get("lora_path"), version_of(fields.get("weight_version"))
        if not isinstance(name, str) or not isinstance(path, str):
            raise wrong_type("lora_name and lora_path: Fields required, strings.")
        async with self._updating:
            try:
                adapter = await asyncio.to_thread(read_adapter, path, self._runner.model)
            except (ArealLiteError, OSError) as error:
                return reply_json({"success": False, "error_message": str(error)}, status=400)
            await self._change_adapter(adapter, name, version)
        return reply_json({"success": True, "loaded_adapters": {name: path}})

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        """Serve the weights without an adapter again."""
        fields = await fields_of(request)
        name, version = fields.get("lora_name"), version_of(fields.get("weight_version"))
        async with self._updating:
            if name is None or name != self.adapter:
                message = f"LoRA with name {name} does not exist."
                return reply_json({"success": False, "error_message": message}, status=400)
            await self._change_adapter(None, None, version)
        return reply_json({"success": True, "loaded_adapters": {}})

    async def _change_adapter(self, adapter: Adapter | None, name: str | None, version: str | None) -> None:
        self.adapter, runner = name, self._runner  # requests from here on run after the command
        await self._model.command(
            lambda: self._scheduler.change_weights(lambda: runner.adapt(adapter), version, abort_all=False)
        )

    def check_adapter(self, body: Any) -> None:
        """Refuse a request that names another adapter; its ``submit`` must follow without waiting."""
        wanted = body.get("lora_path") if isinstance(body, dict) else None
        if wanted and wanted != self.adapter:
            raise invalid_value(f"the adapter {wanted!r} is not loaded; the weights have {self.adapter!r}.")

    def _check_checkpoint(self, model_path: str) -> Checkpoint:
        path = Path(model_path).expanduser()
        checkpoint = Checkpoint(path, self._runner.model)
        check_manifest(path)
        served, tied = self._runner.weight_shapes()
        source = f"checkpoint {str(path)!r}"
        check_shapes(source, checkpoint.shapes, served, tied)
        check_tied(source, checkpoint.shapes, tied, checkpoint.has_equal)
        return checkpoint

    def _load(self, checkpoint: Checkpoint) -> None:
        """Load checked weights in place of weights and adapter; if it fails halfway, restore the served ones."""
        runner = self._runner
        try:
            runner.load_tensors(checkpoint.tensors(), checkpoint.shapes)
            runner.adapt(None)
        except Exception as error:
            if not self._can_restore:
                self._scheduler.weight_version = "mixed"  # no client takes tokens of it
                raise ConfigError(f"loading {str(checkpoint.path)!r} failed ({error}); send weights again.") from error
            served = Checkpoint(Path(self.model_path), runner.model)
            runner.load_tensors(served.tensors(), served.shapes)
            raise ConfigError(
                f"loading {str(checkpoint.path)!r} failed ({error}); the server restored its weights."
            ) from error
