"""Connections to servers by name: addresses are kept, and looked up again once a connection to them fails.

Guarantees that a server that moves is found at its new address by the next connection after a failed one. Keeping
addresses until then means that a name server which is away for a moment disturbs no run.
"""

from __future__ import annotations

from typing import Any

import aiohttp

KEPT_S = 300


class Connector(aiohttp.TCPConnector):
    """Connects, and forgets the addresses of a host to which it cannot."""

    def __init__(self, **options: Any) -> None:
        super().__init__(resolver=aiohttp.ThreadedResolver(), ttl_dns_cache=KEPT_S, **options)

    async def connect(self, req: aiohttp.ClientRequest, traces: Any, timeout: Any) -> Any:
        while True:
            try:
                return await super().connect(req, traces, timeout)
            except KeyError:  # another connection failed, and forgot the addresses between our lookup and its use
                continue
            except BaseException:  # a request whose time is over cancels this
                self.clear_dns_cache(req.url.raw_host, req.url.port)
                raise
