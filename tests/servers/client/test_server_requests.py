"""Requests to one server over HTTP: what is sent, which replies are believed and when a silent server is given up."""

from __future__ import annotations
import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import aiohttp
import pytest
from aiohttp import web
from areal_lite.api import InferenceEngineConfig
from areal_lite.config.rollout_config import FaultsConfig
from areal_lite.errors import ServerError
from areal_lite.servers.client import server_requests
from areal_lite.servers.client.server_requests import RefusedError, ServerRequests, SilentServerError
from areal_lite.servers.dialects.dialect import BadResponse, Chunk, ControlCall, ErrorReply, ServerInfo, ServerLimits
from areal_lite.servers.dialects.reply_reader import ReplyReader
from areal_lite.servers.dialects.sglang import SGLang
from areal_lite.servers.dialects.vllm import VLLM
from areal_lite.servers.pool.server_pool import Server
from tests.fixtures.engines import generation_call
from tests.rollout.scripted import on_a_loop, until

ANSWER = {
    "output_ids": [5, 0],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 5, None], [-0.5, 0, None]],
    },
}


class Site:
    """A server whose routes reply as scripted; others say 404."""

    def __init__(self) -> None:
        self.replies: dict[str, tuple[int, Any]] = {}
        self.headers: dict[str, str] = {}
        self.seen: list[tuple[str, str, Any]] = []
        self.url = ""

    async def reply(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.seen.append((request.method, request.path, json.loads(body) if body else None))
        if request.path == "/hangs":
            await asyncio.Event().wait()
        status, value = self.replies.get(request.path, (404, {}))
        text = value if isinstance(value, str) else json.dumps(value)
        return web.Response(status=status, text=text, headers=self.headers)


@contextlib.asynccontextmanager
async def opened(dialect: Any = None, **config: Any) -> AsyncIterator[tuple[Site, ServerRequests, Server]]:
    site, app = Site(), web.Application()
    app.router.add_route("*", "/{path:.*}", site.reply)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    address = "{}:{}".format(*runner.addresses[0][:2])
    settings = InferenceEngineConfig(backend="sglang", addresses=[address], **config)
    requests = ServerRequests(settings, dialect or SGLang())
    try:
        yield site, requests, Server(f"http://{address}", 0)
    finally:
        await requests.aclose()
        await runner.cleanup()


async def generate(requests: ServerRequests, server: Server, max_new_tokens: int = 9) -> Chunk:
    return await requests.generate(server, b"{}", requests.reader(generation_call(max_new_tokens=max_new_tokens)))


def streaming(requests: ServerRequests) -> ReplyReader:
    """Return a stream that throws its tokens away."""
    return requests.reader(generation_call(stream=True), lambda *_: None)


@on_a_loop
async def test_limits_are_the_smallest_that_a_server_or_the_tokenizer_reports() -> None:
    async with opened() as (_, requests, _):
        assert requests.limits == ServerLimits()
        for told, limits in (
            (ServerInfo(context_length=9, model="m"), ServerLimits(context_length=9)),
            (ServerInfo(vocab_size=8), ServerLimits(9, 8)),
            (ServerInfo(7, 9), ServerLimits(7, 8)),
            (ServerInfo(), ServerLimits(7, 8)),
        ):
            requests.limits.narrow(told)
            assert requests.limits == limits


@pytest.mark.parametrize("size", [6, 5, "six", None])
def test_the_tokenizers_folder_gives_the_vocabulary(tmp_path: Path, size: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))

    async def run() -> None:
        async with opened(tokenizer_path=str(tmp_path)) as (site, requests, server):
            assert requests.limits.vocab_size == (size if isinstance(size, int) else None)
            site.replies["/generate"] = 200, ANSWER
            if size == 5:
                with pytest.raises(BadResponse, match=r"token 5, which is not in the vocabulary \[0, 5\)"):
                    await generate(requests, server)
            else:
                assert (await generate(requests, server)).tokens == [5, 0]

    asyncio.run(run())


@on_a_loop
async def test_a_server_that_reports_no_version_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as (site, requests, server):
        site.replies["/generate"] = 200, ANSWER
        requests.limits.newest_version = 3
        for version in (4, 5):
            requests.version = version
            chunk = await generate(requests, server, 2)
            assert chunk.versions == [version] * 2
        assert sum("does not report the weight version" in line for line in caplog.messages) == 1
        with pytest.raises(BadResponse, match="2 tokens for a request of at most 1"):
            await generate(requests, server, 1)
        meta = ANSWER["meta_info"] | {"weight_version": "9"}  # type: ignore[operator]
        site.replies["/generate"] = 200, ANSWER | {"meta_info": meta}
        requests.limits.newest_version = 9
        assert (await generate(requests, server)).versions == [9, 9]
        requests.limits.newest_version = 8
        with pytest.raises(BadResponse, match="version 9, but the newest is 8"):
            await generate(requests, server)


@pytest.mark.parametrize(("header", "seconds"), [("3", 3.0), ("900", 30.0), ("soon", 0.0), (None, 0.0), ("-1", 0.0)])
@on_a_loop
async def test_a_refusal_says_how_long_to_wait(header: str | None, seconds: float) -> None:
    async with opened() as (site, requests, server):
        site.headers = {} if header is None else {"Retry-After": header}
        for status in (429, 503, 201, 302):
            site.replies["/generate"] = status, {"error": {"message": "busy"}}
            with pytest.raises(ErrorReply, match="busy") as raised:
                await generate(requests, server)
            assert (raised.value.status, raised.value.retry_after_s) == (status, seconds)
            with pytest.raises(ErrorReply, match="busy"):
                await requests.generate(server, b"{}", streaming(requests))
        site.headers["Location"] = "/elsewhere"
        site.replies["/generate"] = 307, {}
        with pytest.raises(ErrorReply):
            await generate(requests, server)
        assert {path for _, path, _ in site.seen} == {"/generate"}


@on_a_loop
async def test_a_server_is_described_by_the_routes_it_has() -> None:
    async with opened() as (site, requests, server):
        with pytest.raises(ErrorReply, match="said HTTP 404 to /server_info, /model_info, /health") as raised:
            await requests.info(server)
        assert raised.value.status == 404 and await requests.is_healthy(server)  # no sign of a hang
        site.replies["/health"] = 200, ""
        assert await requests.info(server) == ServerInfo()
        site.replies["/server_info"] = 200, "<html>"
        assert await requests.info(server) == ServerInfo()
        site.replies |= {"/server_info": (200, {"vocab_size": 8}), "/model_info": (200, {"weight_version": "3"})}
        site.replies["/health"] = 500, ""
        assert await requests.info(server) == ServerInfo(vocab_size=8, version=3)


@on_a_loop
async def test_a_server_is_healthy_if_it_answers_without_an_error_of_its_own() -> None:
    async with opened() as (site, requests, server):
        for status, healthy in ((200, True), (404, True), (499, True), (500, False), (503, False)):
            site.replies["/health"] = status, ""
            assert await requests.is_healthy(server) == healthy
        assert not await requests.is_healthy(Server("http://127.0.0.1:9", 0))


@on_a_loop
async def test_only_adapters_of_runs_are_listed() -> None:
    async with opened() as (site, requests, server):
        assert await requests.adapters(server) == []
        site.replies["/v1/models"] = 200, {"data": [{"id": "base"}, {"id": "areal-lite-1"}, {"id": "areal-lite-2"}]}
        assert await requests.adapters(server) == ["areal-lite-1", "areal-lite-2"]


@on_a_loop
async def test_other_routes_are_asked_with_and_without_a_body() -> None:
    async with opened() as (site, requests, server):
        site.replies["/workers"] = 202, {"status": "accepted"}
        assert json.loads(await requests.ask(server, "GET", "/workers")) == {"status": "accepted"}
        await requests.ask(server, "POST", "/workers", {"url": "u"})
        assert site.seen == [("GET", "/workers", None), ("POST", "/workers", {"url": "u"})]
        for status in (300, 307, 404):
            site.replies["/workers"] = status, {"error": "no"}
            site.headers = {"Location": "/elsewhere"}
            with pytest.raises(ServerError, match=f"/workers said HTTP {status}: no"):
                await requests.ask(server, "GET", "/workers")
        assert {path for _, path, _ in site.seen} == {"/workers"}


@on_a_loop
async def test_a_refused_call_is_told_from_a_server_that_is_away() -> None:
    async with opened() as (site, requests, server):
        call = ControlCall("/update", {"a": 1})
        for reply in ({}, {"success": True}, "not JSON"):
            site.replies["/update"] = 200, reply
            await requests.control(server, call)
        assert site.seen == [("POST", "/update", {"a": 1})] * 3
        site.replies["/update"] = 200, {"success": False, "message": "no such folder"}
        with pytest.raises(RefusedError, match="/update: no such folder"):
            await requests.control(server, call)
        site.headers = {"Location": "/elsewhere"}
        kinds = {400: RefusedError, 500: RefusedError, 307: RefusedError, 429: OSError, 503: OSError}
        for status, kind in kinds.items():
            site.replies["/update"] = status, {"message": "no"}
            with pytest.raises(kind, match=f"/update said HTTP {status}: no"):
                await requests.control(server, call)
        assert {path for _, path, _ in site.seen} == {"/update"}
        with pytest.raises(TimeoutError):
            await requests.control(server, ControlCall("/hangs"), timeout_s=0.05)


class Hanging(SGLang):
    generate_path = "/hangs"


@on_a_loop
async def test_requests_of_a_server_that_is_given_up_end_with_the_reason() -> None:
    async with opened(Hanging(), faults={"request_timeout_s": 60}) as (site, requests, server):
        other = Server(server.url, 1)
        mine, kept, left = [asyncio.create_task(generate(requests, one)) for one in (server, other, server)]
        await asyncio.to_thread(until, lambda: len(site.seen) == 3)
        left.cancel()
        requests.give_up(server, "it hangs")
        requests.give_up(server, "twice")
        with pytest.raises(SilentServerError, match="it hangs"):
            await mine
        with pytest.raises(asyncio.CancelledError):
            await left
        assert not kept.done() and len(requests._silences.pending()) == 1
        kept.cancel()
        await asyncio.wait([kept])
        assert not requests._silences.pending()


@pytest.mark.parametrize("is_router", [False, True])
@on_a_loop
async def test_a_silent_server_is_given_up_unless_it_answers_others(is_router: bool) -> None:
    async with opened(Hanging(), faults={"request_timeout_s": 0.05}) as (_, requests, server):
        server.is_router = is_router
        with pytest.raises(SilentServerError, match=r"no answer in 0.05 s"):
            await generate(requests, server)
        server.heard = time.monotonic() + 1000  # others are answered all the time
        task = asyncio.create_task(generate(requests, server))
        done, _ = await asyncio.wait([task], timeout=5 if is_router else 0.3)
        assert bool(done) == is_router
        server.heard = 0.0
        with pytest.raises(SilentServerError):
            await task


def test_a_dialect_without_versions_of_empty_answers_needs_none(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with opened(VLLM()) as (site, requests, server):
            choice = {"token_ids": [], "logprobs": None, "finish_reason": "abort"}
            site.replies["/inference/v1/generate"] = 200, {"choices": [choice]}
            assert (await generate(requests, server)).finish == "abort"
            choice["finish_reason"] = "stop"
            with pytest.raises(BadResponse, match="no tokens, with the finish reason 'stop'"):
                await generate(requests, server)

    asyncio.run(run())
    assert not caplog.messages


@pytest.mark.parametrize(("addresses", "through", "connections"), [(1, None, 7), (3, None, 7), (3, "r:1", 21)])
@on_a_loop
async def test_a_router_gets_the_connections_of_all_its_servers(
    addresses: int, through: str | None, connections: int
) -> None:
    names = [f"s:{index}" for index in range(addresses)]
    settings = InferenceEngineConfig(
        backend="sglang",
        addresses=names,
        router=through,
        faults={"max_connections_per_server": 7, "request_timeout_s": 60},
    )
    requests = ServerRequests(settings, SGLang())
    await requests.aclose()  # nothing is open yet
    connector = requests._connector
    assert (connector.limit, connector.limit_per_host) == (0, connections)
    with pytest.raises(OSError):
        await generate(requests, Server("http://127.0.0.1:9", 0))
    await requests.aclose()
    assert connector.closed and not requests._silences.pending()


@on_a_loop
async def test_a_stream_must_end_its_answer_and_an_answer_has_tokens() -> None:
    async with opened() as (site, requests, server):
        requests.version = 4
        usual: Any = ANSWER["meta_info"]
        for finish, count, error in (
            (None, 2, "an answer that ends without a finish reason"),
            ({"type": "stop"}, 0, "no tokens, with the finish reason 'stop'"),
            ({"type": "stop"}, 2, None),
        ):
            meta = {**usual, "finish_reason": finish, "completion_tokens": count}
            meta["output_token_logprobs"] = meta["output_token_logprobs"][:count]
            reply: Any = {"output_ids": [5, 0][:count], "meta_info": meta}
            for reader in (streaming(requests), requests.reader(generation_call())):
                site.replies["/generate"] = 200, f"data: {json.dumps(reply)}\n\n" if reader.call.stream else reply
                if error is None:
                    chunk = await requests.generate(server, b"{}", reader)
                    assert (chunk.tokens, chunk.versions) == ([5, 0], [4, 4])
                else:
                    with pytest.raises(BadResponse, match=error):
                        await requests.generate(server, b"{}", reader)


# -- size and pace of replies ------------------------------------------------------------------------


class Paced:
    """A server whose reply is sent in parts, each after a pause."""

    def __init__(self, parts: Iterable[tuple[float, bytes]], status: int = 200) -> None:
        self.parts = parts
        self.status = status
        self.sent = 0

    async def reply(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client reads no more
            for pause_s, part in self.parts:
                await asyncio.sleep(pause_s)
                await response.write(part)
                self.sent += len(part)
        return response


@contextlib.asynccontextmanager
async def paced(server: Paced, **faults: float) -> AsyncIterator[tuple[ServerRequests, Server]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.reply)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = "{}:{}".format(*runner.addresses[0][:2])
    requests = ServerRequests(InferenceEngineConfig(backend="sglang", addresses=[address], faults=faults), SGLang())
    try:
        yield requests, Server(f"http://{address}", 0)
    finally:
        await requests.aclose()
        await runner.cleanup()


def event(count: int, *, last: bool = False) -> bytes:
    """Return the event that brings the last of ``count`` tokens."""
    meta = {"finish_reason": {"type": "stop"} if last else None, "completion_tokens": count}
    meta["output_token_logprobs"] = [[-0.5, 5, None]]
    return b"data: " + json.dumps({"output_ids": [5], "meta_info": meta}).encode() + b"\n\n"


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("route", ["whole", "stream", "info", "control"])
@on_a_loop
async def test_no_reply_is_read_further_than_it_may_be_long(route: str, status: int) -> None:
    server = Paced(((0.0, b" " * 2**18) for _ in itertools.repeat(None)), status)
    async with paced(server) as (requests, address):
        ask = {
            "whole": lambda: generate(requests, address),
            "stream": lambda: requests.generate(address, b"{}", streaming(requests)),
            "info": lambda: requests.info(address),
            "control": lambda: requests.control(address, ControlCall("/update")),
        }[route]
        answers = route in ("whole", "stream") and status == 200
        says = "an event of more than 1089536 bytes" if route == "stream" and answers else "a reply of more than"
        with pytest.raises((BadResponse, aiohttp.ClientPayloadError), match=says):
            await ask()
        assert server.sent < 2**24 + 2**26  # the cap, and what sockets hold


@pytest.mark.parametrize(
    ("parts", "ends"),
    [
        ([(0.0, event(1)), *[(0.01, b":")] * 2000], False),  # bytes without a token
        ([(0.0, b":"), *[(0.01, b":")] * 2000], False),
        ([(0.0, event(1)), *[(0.01, b": ping\n\n")] * 2000], False),
        ([(0.0, event(1)), *[(0.1, event(i)) for i in range(2, 200)]], False),  # 10 tokens/s
        ([*[(0.0, event(i)) for i in range(1, 400)], *[(0.1, b":")] * 200], False),  # fast at first: no more is saved
        ([(0.0, event(i)) for i in range(1, 30)] + [(0.02, event(30, last=True))], True),
        ([(1.2, event(1)), (0.0, event(2)), (1.2, event(3)), (0.0, event(4, last=True))], True),  # a queue, a pause
        ([(0.012, event(i, last=i == 180)) for i in range(1, 181)], True),  # longer than the timeout, and fast enough
        ([(0.0, event(1, last=True)), *[(0.01, b":")] * 2000], True),  # only the connection's end is missing
    ],
)
@on_a_loop
async def test_a_stream_that_has_begun_must_bring_tokens(parts: list[tuple[float, bytes]], ends: bool) -> None:
    timeout_s = 2.0 if ends else 0.6
    async with paced(Paced(parts), request_timeout_s=timeout_s, min_stream_tokens_per_s=40) as (requests, server):
        reader, began = streaming(requests), time.monotonic()
        if ends:
            assert (await requests.generate(server, b"{}", reader)).finish == "stop"
        else:
            with pytest.raises(SilentServerError, match=r"a stream of less than 40 tokens/s|no answer in 0.6 s"):
                await requests.generate(server, b"{}", reader)
        assert time.monotonic() - began < 10
        assert not requests._silences.pending()


def test_each_token_of_a_stream_pays_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(server_requests, "time", SimpleNamespace(monotonic=lambda: now[0]))
    faults = FaultsConfig(request_timeout_s=600, min_stream_tokens_per_s=0.02)

    async def ends_after(*parts: tuple[float, int]) -> int | None:
        """Return the index of the part at which a stream is too slow."""
        request, tokens = server_requests._Request(Server("s:1", 0)), 0
        for index, (pause_s, new) in enumerate(parts):
            now[0] += pause_s
            tokens += new
            if not request.comes_on(tokens, faults):
                return index
        return None

    for parts, index in (
        ([(9999, 1), *[(50, 1)] * 99], None),  # a queue, then one token in 50 s
        ([(9999, 1), *[(51, 1)] * 601], 601),  # 600 s are used up a second at a time
        ([(9999, 1), (599, 1), (50, 1)], None),
        ([(9999, 1), (600, 0)], None),
        ([(9999, 1), (601, 0)], 1),
        ([(9999, 5000), (650, 1)], None),  # the part itself pays too
        ([(9999, 5000), (651, 1)], 1),  # earlier tokens do not
        ([(9999, 1), *[(1, 0)] * 601], 601),
    ):
        assert asyncio.run(ends_after(*parts)) == index, parts[:3]
