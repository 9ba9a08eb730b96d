"""A deterministic inference server in SGLang's dialect, for tests and benchmarks.

An answer is a pure function of (prompt, weight version), so a test knows the truth of every token.
Faults are scheduled by request number. Run alone (``python tests/stub_server.py PORT``) it serves until
it is killed; in a test it runs in a thread of its own.
"""

from __future__ import annotations
import argparse
import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
import orjson
from aiohttp import web

Fault = Callable[[int], str | None]
"""Request number (from 0) -> None or a fault: an HTTP status; reset, hang; garbage, lengths, nan, negative, empty (no
token), cut (aborted half way), long (one more than asked for), newer (a version that no server has); flood (a reply
that never ends), trickle (one whose end does not come), older (first weights swapped in for a token); those of
``LIES``."""
LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other id": lambda reply: reply["meta_info"].update(id="another"),
    "other prompt": lambda reply: reply["meta_info"].update(prompt_tokens=reply["meta_info"]["prompt_tokens"] + 1),
    "first newer": lambda reply: _label_first(reply, "99999"),
    "negative version": lambda reply: _label_first(reply, "-7"),
    "fraction": lambda reply: _label_first(reply, 3.7),
    "30 digits": lambda reply: _label_first(reply, "9" * 30),
    "overflow": lambda reply: reply["meta_info"]["output_token_logprobs"][0].__setitem__(0, -1e39),
}
"""Faults of a reply in which one thing is not true; the rest is as it should be."""


def answer_tokens(prompt: list[int], version: int, length: int) -> list[int]:
    """Return the ``length`` tokens that follow ``prompt`` under ``version``; each carries its version."""
    return [(sum(prompt[-3:]) + i) % 7 + 10 + 100 * version for i in range(length)]


class StubServer:
    """Serves ``/generate`` and the control plane; counts what it saw."""

    def __init__(
        self,
        *,
        answer_len: int = 8,
        delay_s: float = 0.0,
        fault: Fault | None = None,
        tell_version: bool = True,
    ) -> None:
        self.answer_len = answer_len
        self.delay_s = delay_s
        self.fault = fault
        self.tell_version = tell_version
        self.version: str = "default"
        self.seen: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.fail_updates = False
        self.stays_old = False
        """Whether updates are acknowledged and not loaded."""
        self.dead = False
        """Whether every route says 404."""
        self.hangs: set[str] = set()
        """Paths that never answer."""
        self.refuses: set[str] = set()
        """Paths that say 503."""
        self.retry_after: str | None = None
        """Header of a 429."""
        self.image_tokens = 1
        """Tokens that each image of a prompt becomes."""
        self.told: dict[str, Any] = {"context_length": 4096}
        """What it reports about itself."""
        self.paths: Counter[str] = Counter()
        self.adapters: dict[str, str] | None = None
        """Folder of each loaded adapter by its name; None if it was started without support for them."""
        self.hold: asyncio.Event | None = None
        """Answers wait for this event; an abort ends the wait with half the tokens."""
        self.holds: Callable[[list[int]], bool] = lambda input_ids: True
        """Which prompts ``hold`` is for."""
        self.held = threading.Semaphore(0)
        """Released once per answer that is held."""
        self._running: dict[asyncio.Future[None], str] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=2**26, middlewares=[self._faulty])
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_post("/continue_generation", self.resume)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_post("/load_lora_adapter", self.load_adapter)
        app.router.add_post("/unload_lora_adapter", self.unload_adapter)
        app.router.add_post("/update_weight_version", self.update_version)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/server_info", self.info)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/health", self.health)
        return app

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.paths[request.path] += 1
        if self.dead:
            return _json({"detail": "Not Found"}, status=404)
        if request.path in self.refuses:
            return _json({}, status=503)
        if request.path in self.hangs:
            await asyncio.Event().wait()
        response: web.StreamResponse = await handler(request)
        return response

    async def health(self, _: web.Request) -> web.Response:
        """Answer at once."""
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        """Tell the version."""
        return _json({"weight_version": self.version} if self.tell_version else {})

    async def info(self, _: web.Request) -> web.Response:
        """Tell the window."""
        self.seen["info"] += 1
        return _json(self.told)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer, or fail as scheduled."""
        number = self.seen["generate"]
        self.seen["generate"] += 1
        body = orjson.loads(await request.read())
        self.requests.append(body) if len(self.requests) < 10_000 else None
        fault = self.fault(number) if self.fault else None
        if fault is not None:
            self.seen[f"fault {fault}"] += 1
        if fault is not None and fault.isdigit():
            headers = {"Retry-After": self.retry_after} if self.retry_after and fault == "429" else None
            return _json({"error": {"message": f"scheduled {fault}"}}, status=int(fault), headers=headers)
        if fault == "queue full":  # as SGLang says it
            return _json({"error": {"message": "The request queue is full."}}, status=503)
        if (name := body.get("lora_path")) is not None and name not in (self.adapters or {}):
            return _json({"error": {"message": f"Got LoRA adapter that has never been loaded: {name}"}}, status=400)
        if fault in ("hang", "reset", "garbage", "flood", "trickle"):
            return await self._no_answer(request, fault)
        await self._resumed.wait()
        length = min(self.answer_len, body["sampling_params"]["max_new_tokens"])
        version = 0 if self.version == "default" else int(self.version)
        finish: dict[str, Any] = {"type": "stop", "matched": 2}
        if fault == "length":
            finish = {"type": "length", "length": length}
        if fault == "abort":
            length, finish = 0, {"type": "abort", "message": "Aborted"}
        elif fault == "cut" or await self._generating(body):
            length, finish = length // 2, {"type": "abort", "message": "Aborted"}
        elif self.version != "default":
            version = int(self.version)
        if fault == "empty":
            length = 0
        if fault == "long":
            length = body["sampling_params"]["max_new_tokens"] + 1
        tokens = answer_tokens(body["input_ids"], version, length)
        label = self.version if finish["type"] == "abort" or version == 0 else str(version)
        if fault == "newer":
            label = "99"
        reply = self._reply(body, tokens, finish, label if self.tell_version else None, fault)
        if fault == "older":
            _label_first(reply, "default")
        if fault in LIES:
            LIES[fault](reply)
        return await _streamed(request, reply) if body.get("stream") else _json(reply)

    def _reply(
        self,
        body: dict[str, Any],
        tokens: list[int],
        finish: dict[str, Any],
        label: str | None,
        fault: str | None,
    ) -> dict[str, Any]:
        pairs: list[list[Any]] = [[-0.5 - i / 64, token, None] for i, token in enumerate(tokens)]
        ids = list(tokens)
        if fault == "lengths":
            ids = ids[:-1]
        if fault == "nan":
            pairs[0][0] = None
        if fault == "negative":
            pairs[0][1] = ids[0] = -5
        meta: dict[str, Any] = {
            "id": body.get("rid"),
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]) + (self.image_tokens - 1) * len(body.get("image_data", ())),
            "completion_tokens": len(tokens),
            "output_token_logprobs": pairs,
        }
        if label is not None:
            meta |= {
                "weight_version": label,
                "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}] if tokens else [],
            }
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def _no_answer(self, request: web.Request, fault: str) -> web.StreamResponse:
        """Send no reply, no JSON, or a reply without an end, fast or slowly, and count its bytes."""
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "reset":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if fault == "garbage":
            return web.Response(body=b"<html>oops", content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client reads no more
            while True:
                part = b" " * (2**18 if fault == "flood" else 1)
                await response.write(part)
                self.seen["bytes"] += len(part)
                await asyncio.sleep(0 if fault == "flood" else 0.005)
        return response

    async def _generating(self, body: dict[str, Any]) -> bool:
        """Wait as long as the answer takes; return whether it was aborted."""
        if self.hold is None or not self.holds(body["input_ids"]):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            return False
        aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[aborted] = body.get("rid", "")
        held = asyncio.ensure_future(self.hold.wait())
        self.held.release()
        try:
            await asyncio.wait([aborted, held], return_when=asyncio.FIRST_COMPLETED)
        finally:
            held.cancel()
            del self._running[aborted]
        return aborted.done()

    async def abort(self, request: web.Request) -> web.Response:
        """Abort the requests whose id begins with ``rid``."""
        rid = orjson.loads(await request.read())["rid"]
        self.seen["abort"] += 1
        for aborted, running in self._running.items():
            if running.startswith(rid) and not aborted.done():
                aborted.set_result(None)
        return _json({})

    async def pause(self, request: web.Request) -> web.Response:
        """Abort what runs, unless it is kept, and hold new requests."""
        kept = orjson.loads(await request.read())["mode"] == "retract"
        self.seen["pause"] += 1
        self._resumed.clear()
        for aborted in [] if kept else list(self._running):
            aborted.done() or aborted.set_result(None)
        return _json({"status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        """Go on."""
        await request.read()
        self.seen["resume"] += 1
        self._resumed.set()
        return _json({"status": "ok"})

    async def update(self, request: web.Request) -> web.Response:
        """Take a new version."""
        body = orjson.loads(await request.read())
        self.seen["update"] += 1
        if self.fail_updates:
            return _json({"success": False, "message": "no such folder"}, status=400)
        if not self.stays_old:
            self.version = body["weight_version"]
        return _json({"success": True, "message": "ok"})

    async def load_adapter(self, request: web.Request) -> web.Response:
        """Take an adapter under a new name."""
        body = orjson.loads(await request.read())
        if self.adapters is None or body["lora_name"] in self.adapters:
            return _json({"success": False, "error_message": "LoRA is not enabled."}, status=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return _json({"success": True, "error_message": ""})

    async def unload_adapter(self, request: web.Request) -> web.Response:
        """Forget an adapter."""
        assert self.adapters is not None
        del self.adapters[orjson.loads(await request.read())["lora_name"]]
        return _json({"success": True, "error_message": ""})

    async def update_version(self, request: web.Request) -> web.Response:
        """Take a new version without weights."""
        self.version = orjson.loads(await request.read())["new_version"]
        return _json({"success": True, "new_version": self.version})

    async def models(self, _: web.Request) -> web.Response:
        """List the base model and the adapters."""
        return _json({"data": [{"id": name} for name in ("base", *(self.adapters or {}))]})


class StubThread:
    """Runs a stub server in a thread; a context manager that gives the address."""

    def __init__(self, server: StubServer) -> None:
        self.server = server
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)

    def __enter__(self) -> StubThread:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def call(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the server's loop."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(), done.set()))
        assert done.wait(10)

    def until_held(self, count: int) -> None:
        """Return once ``count`` more answers are being held."""

        for _ in range(count):
            assert self.server.held.acquire(timeout=10)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(self.server.app(), access_log=None, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        assert site._server is not None
        self.address = f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = orjson.dumps(value)
    return web.Response(body=body, content_type="application/json", status=status, headers=headers)


def _label_first(reply: dict[str, Any], label: Any) -> None:
    """Label the first token of an answer with another version."""
    (span,) = reply["meta_info"]["weight_versions"]
    first = {"version": label, "start": 0, "end": 1}
    reply["meta_info"]["weight_versions"] = [first, {**span, "start": 1}]


async def _streamed(request: web.Request, reply: dict[str, Any]) -> web.StreamResponse:
    """Send the reply token by token, each event with all tokens so far."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    meta, last = reply["meta_info"], len(reply["output_ids"])
    for count in range(min(1, last), last + 1):
        part = {**meta, "completion_tokens": count}
        part["output_token_logprobs"] = meta["output_token_logprobs"][:count]
        if count < last:
            part |= {"finish_reason": None, "weight_versions": None}
        event = {"text": "", "output_ids": reply["output_ids"][:count], "meta_info": part}
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def main() -> None:
    """Serve on the given port until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--answer-len", type=int, default=64)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--context-length", type=int, default=4096)
    args = parser.parse_args()
    server = StubServer(answer_len=args.answer_len, delay_s=args.delay_s)
    server.told["context_length"] = args.context_length
    web.run_app(server.app(), host="127.0.0.1", port=args.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
