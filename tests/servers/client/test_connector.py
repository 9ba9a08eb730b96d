"""A server is found again when its name gets another address."""

from __future__ import annotations
import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any
import aiohttp
import pytest
from aiohttp import web
from areal_lite.api import InferenceEngineConfig
from areal_lite.servers.client.connections import Connector
from areal_lite.servers.client.server_requests import ServerRequests, bounded_body
from areal_lite.servers.dialects.dialect import ControlCall
from areal_lite.servers.dialects.sglang import SGLang
from areal_lite.servers.pool.server_pool import Server
from tests.rollout.scripted import on_a_loop

HOST = "moving.test"


class Names:
    """The name server: one address, or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address: str | None = "127.0.0.1"
        self.lookups = 0
        self.then: Callable[[], None] | None = None
        """Called once, between the end of the next lookup and those that wait for it."""
        monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", self.resolve)

    async def resolve(self, host: str, port: int = 0, family: Any = None) -> list[Any]:
        assert host == HOST
        self.lookups += 1
        await asyncio.sleep(0)
        if self.address is None:
            raise OSError("no such name")
        if self.then is not None:
            asyncio.get_running_loop().call_soon(self.then)
            self.then = None
        return [{"hostname": host, "host": self.address, "port": port, "family": 2, "proto": 0, "flags": 0}]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@asynccontextmanager
async def serving(address: str, port: int = 0) -> AsyncIterator[int]:
    """Serve a page that says the server's address, on one connection per request; yields the port."""

    async def page(_: web.Request) -> web.Response:
        response = web.Response(text=address)
        response.force_close()
        return response

    app = web.Application()
    app.router.add_get("/", page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def client(port: int) -> tuple[ServerRequests, Server]:
    requests = ServerRequests(InferenceEngineConfig(backend="sglang", addresses=[f"{HOST}:{port}"]), SGLang())
    return requests, Server(f"http://{HOST}:{port}", 0)


@on_a_loop
async def test_addresses_are_kept_while_connections_succeed(names: Names) -> None:
    async with serving("127.0.0.1") as port:
        requests, server = client(port)
        assert set(await asyncio.gather(*(requests.ask(server, "GET", "/") for _ in range(9)))) == {b"127.0.0.1"}
        names.address = None
        assert await requests.ask(server, "GET", "/") == b"127.0.0.1"
        assert names.lookups == 1  # connections that need it at the same time share it
        await requests.aclose()


@on_a_loop
async def test_a_lookup_that_is_forgotten_before_its_use_is_made_again(names: Names) -> None:
    async with serving("127.0.0.1") as port:
        requests, server = client(port)
        names.then = requests._control.clear_dns_cache
        assert await asyncio.gather(*(requests.ask(server, "GET", "/") for _ in range(3))) == [b"127.0.0.1"] * 3
        assert names.lookups == 2 and names.then is None
        await requests.aclose()


@on_a_loop
async def test_a_server_that_moves_is_found_after_one_failed_connection(names: Names) -> None:
    async with serving("127.0.0.1") as port:
        requests, server = client(port)
        assert await requests.ask(server, "GET", "/") == b"127.0.0.1"
    names.address = "127.0.0.2"
    async with serving("127.0.0.2", port):
        failed = await asyncio.gather(*(requests.ask(server, "GET", "/") for _ in range(9)), return_exceptions=True)
        assert {type(error) for error in failed} == {aiohttp.ClientConnectorError}
        assert await requests.ask(server, "GET", "/") == b"127.0.0.2"
    await requests.aclose()


@on_a_loop
async def test_an_address_that_swallows_connections_is_looked_up_again(names: Names) -> None:
    with ExitStack() as sockets:
        full = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = full.getsockname()[1]
        for _ in range(8):  # more than the backlog holds
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        requests, server = client(port)
        with pytest.raises(TimeoutError):
            await requests.control(server, ControlCall("/", {}), timeout_s=0.1)
        names.address = "127.0.0.2"
        async with serving("127.0.0.2", port):
            assert await requests.ask(server, "GET", "/") == b"127.0.0.2"
        await requests.aclose()


@asynccontextmanager
async def replying(*replies: bytes) -> AsyncIterator[tuple[str, list[list[bytes]], asyncio.Event]]:
    """Send these replies, each to a request with a body of two bytes; yields the URL, the requests by connection, and
    what is set by the first."""
    connections: list[list[bytes]] = []
    asked = asyncio.Event()
    left = list(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests: list[bytes] = []
        connections.append(requests)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                requests.append(head + await reader.readexactly(2))
                asked.set()
                writer.write(left.pop(0))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://user:word@127.0.0.1:{server.sockets[0].getsockname()[1]}/generate", connections, asked


async def posted(connector: Connector, url: str, **headers: str) -> tuple[int, bytes]:
    reply = await connector.send("POST", url, b"{}", headers)
    try:
        return reply.status, await bounded_body(reply.content, 9)
    finally:
        reply.connection.release()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@on_a_loop
async def test_a_post_has_its_head_and_leaves_the_connection_to_the_next() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK.replace(b"200 OK", b"429 Later")
    async with replying(OK, early) as (url, connections, _):
        connector = Connector(5.0)
        assert await posted(connector, url) == (200, b"ok")
        assert await posted(connector, url, Session="7") == (429, b"ok")
        await connector.close()
    ((first, second),) = connections
    lines = first.decode().split("\r\n")
    assert lines[0] == "POST /generate HTTP/1.1" and lines[-2:] == ["", "{}"]
    headers = dict(line.split(": ") for line in lines[1:-2])
    assert headers["Host"] == url.partition("@")[2].removesuffix("/generate")
    assert (headers["Content-Type"], headers["Content-Length"]) == ("application/json", "2")
    assert headers["Authorization"] == "Basic dXNlcjp3b3Jk"
    assert "Accept-Encoding" not in headers  # nothing is decompressed
    assert second == first.replace(b"Content-Length", b"Session: 7\r\nContent-Length")


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (OK.replace(b": 2", b": 20"), 200),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\n", 200),
        (b"not HTTP\r\n\r\n", 0),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", 200),
    ],
)
@on_a_loop
async def test_a_connection_whose_reply_has_a_rest_is_not_used_again(reply: bytes, status: int) -> None:
    async with replying(reply, OK) as (url, connections, _):
        connector = Connector(5.0)
        if status:
            first = await connector.send("POST", url, b"{}")
            assert first.status == status
            first.connection.release()
        else:
            with pytest.raises(aiohttp.ClientPayloadError, match="not HTTP"):
                await connector.send("POST", url, b"{}")
        assert await posted(connector, url) == (200, b"ok")
        await connector.close()
    assert [len(requests) for requests in connections] == [1, 1]


@on_a_loop
async def test_a_post_that_is_cancelled_closes_its_connection() -> None:
    async with replying(b"", OK) as (url, connections, asked):
        connector = Connector(5.0)
        waiting = asyncio.ensure_future(connector.send("POST", url, b"{}"))
        await asked.wait()
        waiting.cancel()
        assert await posted(connector, url) == (200, b"ok")
        await connector.close()
    assert [len(requests) for requests in connections] == [1, 1]
