"""Connections to servers by name: addresses are kept, and looked up again once a connection to them fails.

Guarantees that a server that moves is found at its new address by the next connection after a failed one. Keeping
addresses until then means that a name server which is away for a moment disturbs no run. aiohttp's own cache cannot
forget an address safely: a connection that waits for the lookup of another would find nothing and raise KeyError.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

KEPT_S = 300.0


class Connector(aiohttp.TCPConnector):
    """Connects, and forgets the addresses of a host to which it cannot."""

    def __init__(self, **options: Any) -> None:
        self._addresses = _Addresses()
        super().__init__(resolver=self._addresses, use_dns_cache=False, **options)

    async def connect(self, req: aiohttp.ClientRequest, traces: Any, timeout: Any) -> Any:
        try:
            return await super().connect(req, traces, timeout)
        except BaseException:  # a request whose time is over cancels this
            self._addresses.forget(req.url.raw_host)
            raise

    async def close(self, **options: Any) -> None:
        await super().close(**options)
        await self._addresses.close()


class _Addresses(AbstractResolver):
    def __init__(self) -> None:
        self._resolver = aiohttp.ThreadedResolver()
        self._lookups: dict[str, asyncio.Task[list[ResolveResult]]] = {}
        """By host; connections that need the same one wait for it together."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        if host not in self._lookups:
            self._lookups[host] = loop.create_task(self._resolver.resolve(host, port, family))
            loop.call_later(KEPT_S, self.forget, host)
        found = await asyncio.shield(self._lookups[host])
        found.append(found.pop(0))  # the next connection begins with another of them
        return [{**address, "port": port} for address in found]

    def forget(self, host: str | None) -> None:
        if host in self._lookups and self._lookups[host].done():
            del self._lookups[host]

    async def close(self) -> None:
        for lookup in self._lookups.values():
            lookup.cancel()
