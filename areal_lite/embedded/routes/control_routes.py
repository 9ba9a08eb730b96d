"""Pausing, health, and what the server says of itself. ``/health`` answers at once in every state."""

import time
from typing import Any
from aiohttp import web
from areal_lite import __version__
from areal_lite.embedded.bad_request import wrong_type
from areal_lite.embedded.model_thread import ModelThread
from areal_lite.embedded.routes.http_server import fields_of, reply_json
from areal_lite.embedded.routes.weight_routes import WeightRoutes


class ControlRoutes:
    """Pauses and describes the model; ``/server_info`` shows ``description`` besides the counters."""

    def __init__(self, model: ModelThread, weights: WeightRoutes, description: dict[str, Any]) -> None:
        self._model = model
        self._scheduler = model.scheduler
        self._weights = weights
        self._description = description

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post("/pause_generation", self._pause)
        router.add_post("/continue_generation", self._continue)
        router.add_route("*", "/flush_cache", self._flush_cache)
        for path in ("/model_info", "/server_info", "/get_model_info", "/get_server_info"):
            router.add_get(path, self._info)
        router.add_get("/v1/loads", self._loads)
        router.add_get("/v1/models", self._models)
        router.add_get("/health", self._health)
        router.add_get("/health_generate", self._health)

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await fields_of(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise wrong_type(f"mode: Input should be 'abort', 'retract' or 'in_place', got {mode!r}.")
        await self._model.command(lambda: self._scheduler.pause(mode))
        return reply_json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await fields_of(request)
        await self._model.command(self._scheduler.resume)
        return reply_json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, _request: web.Request) -> web.Response:
        await self._model.command(self._scheduler.flush_cache)
        return web.Response(text="Cache flushed.\n")

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self._model.alive else 503)

    async def _info(self, _request: web.Request) -> web.Response:
        info = {
            "version": __version__,
            "model_path": self._weights.model_path,
            "weight_version": self._scheduler.weight_version,
            "is_paused": self._scheduler.paused,
            **self._description,
            "context_length": self._scheduler.runner.context_length,
            "vocab_size": self._scheduler.runner.vocab_size,
            "max_running_requests": self._scheduler.limits.max_running_requests,
            "max_total_num_tokens": self._scheduler.limits.max_total_tokens,
        }
        return reply_json(info)

    async def _loads(self, _request: web.Request) -> web.Response:
        scheduler = self._scheduler
        used = sum(len(one.prompt) + len(one.output_ids) for one in tuple(scheduler.running))
        load = {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_used_tokens": used,
            "token_usage": used / scheduler.limits.max_total_tokens,
            "generated_tokens": scheduler.generated_tokens,
            "paused": scheduler.paused,
        }
        return reply_json({"timestamp": time.time(), "version": __version__, "num_accelerators": 1, "loads": [load]})

    async def _models(self, _request: web.Request) -> web.Response:
        path, length = self._weights.model_path, self._scheduler.runner.context_length
        model = {"id": path, "object": "model", "created": int(time.time()), "owned_by": "areal_lite"}
        model |= {"root": path, "parent": None, "max_model_len": length}
        adapter = {"id": self._weights.adapter, "object": "model", "root": self._weights.adapter, "parent": path}
        return reply_json({"object": "list", "data": [model, *([adapter] if self._weights.adapter else [])]})
