"""A server is found again when its name gets another address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from areal_lite.api import InferenceEngineConfig
from areal_lite.servers.client.server_requests import Connector, ServerRequests
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
    requests.open()
    return requests, Server(f"http://{HOST}:{port}", 0)


@on_a_loop
async def test_addresses_are_kept_while_connections_succeed(names: Names) -> None:
    async with serving("127.0.0.1") as port:
        requests, server = client(port)
        assert set(await asyncio.gather(*(requests.ask(server, "GET", "/") for _ in range(9)))) == {b"127.0.0.1"}
        names.address = None
        assert await requests.ask(server, "GET", "/") == b"127.0.0.1"
        assert names.lookups == 1  # connections that need it at the same time share it
        await requests.close()


@on_a_loop
async def test_a_lookup_that_is_forgotten_before_its_use_is_made_again(names: Names) -> None:
    async with serving("127.0.0.1") as port:
        requests, server = client(port)
        assert requests._session is not None and isinstance(requests._session.connector, Connector)
        names.then = requests._session.connector.clear_dns_cache
        assert await asyncio.gather(*(requests.ask(server, "GET", "/") for _ in range(3))) == [b"127.0.0.1"] * 3
        assert names.lookups == 2 and names.then is None
        await requests.close()


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
    await requests.close()


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
        await requests.close()
