"""What sglang-router 0.3.2 does, as far as the engine sees it: a list of workers, sticky keys, dropped parameters."""

from __future__ import annotations
import asyncio
import uuid
from collections import Counter
from typing import Any
import aiohttp
import orjson
from aiohttp import web
from areal_lite.servers.pool.sglang_router import _PASSED_ON

_FIELDS = {"rid", "input_ids", "sampling_params", "return_logprob", "stream", "top_logprobs_num"}


class RouterStandIn:
    """Passes ``/generate`` on to workers by the header X-SMG-Routing-Key, else in turn; checks a new worker first."""

    def __init__(self) -> None:
        self.workers: dict[str, str] = {}
        """URL of each worker by its id."""
        self.keys: dict[str, str] = {}
        """Worker of each routing key."""
        self.sent: Counter[str] = Counter()
        """Generations by worker."""
        self.frozen = False
        """Whether changes of the list are acknowledged and not made."""
        self.of_worker: dict[str, Any] = {"is_healthy": True}
        """What it says about each worker."""
        self.is_old = False
        """Whether it has the routes of sglang-router before 0.3."""
        self._adding: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/workers", self.list)
        app.router.add_get("/list_workers", self.list_urls)
        app.router.add_post("/workers", self.add)
        app.router.add_delete("/workers/{id}", self.remove)
        app.on_cleanup.append(self.end)
        return app

    async def end(self, _: web.Application) -> None:
        """End the checks of workers that were about to be added."""
        for task in (tasks := list(self._adding)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def list(self, _: web.Request) -> web.Response:
        """List the workers."""
        if self.is_old:
            return web.json_response({}, status=404)
        workers = [{"id": key, "url": url, **self.of_worker} for key, url in self.workers.items()]
        return web.json_response({"workers": workers, "total": len(workers)})

    async def list_urls(self, _: web.Request) -> web.Response:
        """List the workers as old routers do."""
        return web.json_response({"urls": list(self.workers.values())})

    async def add(self, request: web.Request) -> web.Response:
        """Add a worker once it is healthy."""
        url = (await request.json())["url"]

        async def check() -> None:
            async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as reply:
                if reply.status == 200 and url not in self.workers.values() and not self.frozen:
                    self.workers[str(uuid.uuid4())] = url

        self._adding.add(task := asyncio.create_task(check()))
        task.add_done_callback(self._adding.discard)
        return web.json_response({"status": "accepted"}, status=202)

    async def remove(self, request: web.Request) -> web.Response:
        """Remove a worker."""
        if request.match_info["id"] not in self.workers:
            return web.json_response({"error": "not found", "code": "WORKER_NOT_FOUND"}, status=404)
        if not self.frozen:
            del self.workers[request.match_info["id"]]
        return web.json_response({"status": "accepted"}, status=202)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Pass a generation on, and the reply back as it arrives."""
        urls = list(self.workers.values())
        if not urls:
            return web.json_response({"error": {"message": "No available workers"}}, status=503)
        key = request.headers.get("X-SMG-Routing-Key")
        url = self.keys.get(key or "")
        if url not in urls:
            url = min(urls, key=lambda one: self.sent[one])
            if key is not None:
                self.keys[key] = url
        assert url is not None
        self.sent[url] += 1
        body: dict[str, Any] = {k: v for k, v in orjson.loads(await request.read()).items() if k in _FIELDS}
        body["sampling_params"] = {k: v for k, v in body["sampling_params"].items() if k in _PASSED_ON}
        try:
            async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as reply:
                response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
                await response.prepare(request)
                async for data in reply.content.iter_any():
                    await response.write(data)
                return response
        except aiohttp.ClientConnectorError as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)
