"""One server of ``chaos.py``: speaks SGLang's protocol, generates at a fixed rate, and fails as its seed says.

Every token names the weights that made it (``token // 100`` is the version), so a client can compare its label with the
truth. Faults of single replies are drawn from the seed; the others last as long as ``POST /chaos`` says.
"""

from __future__ import annotations
import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any
import orjson
import uvloop
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.stub_server import LIES, StubServer, _json, answer_tokens

VOCABULARY = 2_000_000
WINDOW = 8192
REPLY_FAULTS = {
    "reset": 0.015,
    "500": 0.01,
    "truncated": 0.005,
    "garbage": 0.002,
    "lengths": 0.002,
    "nan": 0.002,
    "vocabulary": 0.002,
    "empty": 0.002,
    "long": 0.002,
    "newer": 0.002,
    "drip": 0.002,
    "flood": 0.001,
    **dict.fromkeys(LIES, 0.001),
}
"""Faults of one reply and their share of all replies."""
SOUND = (None, "drip")
"""Faults after which the client has the tokens."""
DRIP_S = 2.0
"""Seconds in which a dripping reply arrives."""


class ChaosServer(StubServer):
    """A stub server whose answers take their turn: together they are ``tokens_per_s`` fast.

    Args:
        tokens_per_s: Tokens that all requests together get per second.
        seed: Decides which replies fail.
        replies_fail: Whether replies fail from the start.
    """

    def __init__(self, *, tokens_per_s: float, seed: int, replies_fail: bool) -> None:
        super().__init__()
        self.replies_fail = replies_fail
        self.requests = deque(maxlen=0)  # type: ignore[assignment]  # the base class would record them
        self.told = {"context_length": WINDOW, "vocab_size": VOCABULARY}
        self.sites: list[web.TCPSite] = []
        self.replies = 0
        """Replies that could have failed."""
        self.generated = self.spoiled = 0
        """Tokens generated while replies could fail, and those of them in replies that a fault spoiled."""
        self._token_s = 1 / tokens_per_s
        self._free_at = 0.0
        self._draw = random.Random(seed)
        self._lengths = [min(256, 1 + int(random.Random(i).lognormvariate(2.3, 0.8))) for i in range(1009)]
        self._until = {"503": 0.0, "429": 0.0}
        self._tasks: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = super().app()
        app.router.add_post("/chaos", self.chaos)
        app.router.add_get("/chaos", self.counts)
        return app

    async def counts(self, _: web.Request) -> web.Response:
        """Tell how often each fault was injected."""
        faults = {name.removeprefix("fault "): n for name, n in self.seen.items() if name.startswith("fault ")}
        counts = {name: getattr(self, name) for name in ("replies", "generated", "spoiled")}
        return _json({"faults": faults, **counts})

    async def chaos(self, request: web.Request) -> web.Response:
        """Begin a fault that lasts, or turn those of single replies on or off."""
        order = orjson.loads(await request.read())
        kind, seconds = order["kind"], order.get("seconds", 0.0)
        if kind in self._until:
            self._until[kind] = time.monotonic() + seconds
        elif kind == "stays old":
            self.stays_old = True
            asyncio.get_running_loop().call_later(seconds, setattr, self, "stays_old", False)
        elif kind == "partition":
            task = asyncio.create_task(self._partition(request.app, seconds))
            self._tasks.add(task)
        else:
            self.replies_fail = kind == "on"
        return _json({})

    async def _partition(self, app: web.Application, seconds: float) -> None:
        """Refuse connections and break those that are open."""
        await asyncio.sleep(0.02)  # the order's reply is out
        (site,) = self.sites
        runner, port = site._runner, site._port
        await site.stop()
        assert runner.server is not None
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(seconds)
        self.sites = [web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)]
        await self.sites[0].start()

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if time.monotonic() < self._until["503"] and request.path != "/chaos":
            self.seen["fault 503"] += 1
            return _json({}, status=503)
        response: web.StreamResponse = await handler(request)
        return response

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer, or fail as drawn."""
        body = orjson.loads(await request.read())
        if time.monotonic() < self._until["429"] and len(self._running) >= 8:
            self.seen["fault 429"] += 1
            return _json({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "1"})
        fault = None
        if self.replies_fail:
            self.replies += 1
            (fault,) = self._draw.choices((*REPLY_FAULTS, None), (*REPLY_FAULTS.values(), _SOUND))
        if fault == "500":
            self._count(fault)
            return _json({"error": {"message": "broken"}}, status=500)
        if fault in ("garbage", "flood"):
            self._count(fault)
            return await self._no_answer(request, fault)
        await self._resumed.wait()
        return await self._answer(request, body, fault)

    def _count(self, fault: str | None) -> None:
        """Count a fault as it goes out: that of a request that was cancelled reaches nobody."""
        if fault is not None:
            self.seen[f"fault {fault}"] += 1

    async def _answer(self, request: web.Request, body: dict[str, Any], fault: str | None) -> web.StreamResponse:
        budget, version = body["sampling_params"]["max_new_tokens"], int(self._label)
        length = self._lengths[sum(body["input_ids"]) % len(self._lengths)]
        finish: dict[str, Any] = {"type": "stop", "matched": 2} if length <= budget else {"type": "length"}
        length = min(length, budget)
        if fault == "reset":
            await asyncio.sleep(self._draw.random() * max(0.0, self._free_at - time.monotonic()))
            assert request.transport is not None
            self._count(fault)
            request.transport.abort()
            return web.Response()
        done = await self._in_turn(body, length)
        if self.replies_fail:
            self.generated += done
            self.spoiled += done if fault not in SOUND else 0
        if done < length:
            length, finish = done, {"type": "abort", "message": "Aborted"}
        if fault == "empty":
            length, finish = 0, {"type": "stop", "matched": 2}
        if fault == "long":
            length = budget + 1
        tokens = answer_tokens(body["input_ids"], version, length)
        label = "99999" if fault == "newer" else str(version)
        reply = self._reply(body, tokens, finish, label, fault if length else None)
        if fault == "vocabulary" and length:
            reply["output_ids"][0] = reply["meta_info"]["output_token_logprobs"][0][1] = VOCABULARY
        if fault in LIES and length:
            LIES[fault](reply)
        if length or fault == "empty":
            self._count(fault)
        if fault in ("truncated", "drip"):
            return await _slowly(request, orjson.dumps(reply), cut=fault == "truncated")
        return _json(reply)

    async def update(self, request: web.Request) -> web.Response:
        """Take a new version, or only say so."""
        self.seen["fault stays old"] += self.stays_old
        return await super().update(request)

    @property
    def _label(self) -> str:
        return "0" if self.version == "default" else self.version

    async def _in_turn(self, body: dict[str, Any], length: int) -> int:
        """Wait for the answer's turn and its generation; return how many tokens it has, fewer after an abort."""
        now = time.monotonic()
        starts = max(now, self._free_at)
        ends = self._free_at = starts + length * self._token_s
        aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[aborted] = body.get("rid", "")
        try:
            async with asyncio.timeout(ends - now):
                await aborted
        except TimeoutError:
            return length
        finally:
            del self._running[aborted]
        return max(0, min(length - 1, int((time.monotonic() - starts) / self._token_s)))

    async def pause(self, request: web.Request) -> web.Response:
        """Abort what runs and hold new requests."""
        self._free_at = 0.0
        return await super().pause(request)


_SOUND = 1 - sum(REPLY_FAULTS.values())


async def _slowly(request: web.Request, body: bytes, *, cut: bool) -> web.StreamResponse:
    """Send a reply in two halves or, if it is cut, only the first."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if cut:
        assert request.transport is not None
        request.transport.close()
        return response
    with contextlib.suppress(ConnectionResetError):  # the client is gone
        for i in range(10):
            await asyncio.sleep(DRIP_S / 10)
            start = len(body) // 2 + i
            await response.write(body[start : start + 1] if i < 9 else body[start:])
    return response


async def serve(server: ChaosServer, port: int) -> None:
    """Serve until killed."""
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    server.sites = [web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)]
    await server.sites[0].start()
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve on a port until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--tokens-per-s", type=float, default=1600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replies-fail", action="store_true")
    args = parser.parse_args()
    server = ChaosServer(tokens_per_s=args.tokens_per_s, seed=args.seed, replies_fail=args.replies_fail)
    uvloop.run(serve(server, args.port))


if __name__ == "__main__":
    main()
