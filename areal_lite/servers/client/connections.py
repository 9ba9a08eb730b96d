"""Keep-alive connections to servers, and one request over one of them.

aiohttp keeps the connections and parses the replies. Its sessions are left out: they take more CPU than all the rest of
a short model call, for what no server needs: redirects, cookies, proxies, a task for each body.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple
import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL


class Reply(NamedTuple):
    """A reply whose head has come. Read ``content``, then release ``connection``, which closes it if a part is left."""

    status: int
    headers: Mapping[str, str]
    content: aiohttp.StreamReader
    connection: aiohttp.connector.Connection


class Connector(aiohttp.TCPConnector):
    """Keeps the addresses of servers, and looks one up again once a connection to it fails. So a server that moves is
    found by the next connection, and a name server that is away for a moment disturbs no run."""

    def __init__(self, connect_timeout_s: float, *, limit_per_host: int = 0) -> None:
        """A ``limit_per_host`` of 0 is none."""
        # uvicorn closes idle connections after 5 s and aiohttp does not retry a POST on a closed one.
        limits: dict[str, Any] = {"limit": 0, "limit_per_host": limit_per_host}
        limits |= {"keepalive_timeout": 4, "ttl_dns_cache": 300}  # seconds
        super().__init__(resolver=aiohttp.ThreadedResolver(), **limits)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._targets: dict[tuple[str, str], tuple[aiohttp.ClientRequest, bytes]] = {}
        """By method and URL, what connections are made for, and the lines of a head that all requests have."""

    async def connect(self, req: aiohttp.ClientRequest, traces: Any, timeout: Any) -> Any:
        while True:
            try:
                return await super().connect(req, traces, timeout)
            except KeyError:  # another connection failed, and forgot the addresses between our lookup and its use
                continue
            except BaseException:  # a request whose time is over cancels this
                self.clear_dns_cache(req.url.raw_host, req.url.port)
                raise

    async def send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None = None) -> Reply:
        """Send a request; ``body`` is JSON. Raises ClientError, TimeoutError or OSError."""
        request, head = self._targets.get((method, url)) or self._target(method, url)
        try:
            connection = await self.connect(request, [], self._timeout)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {request.headers['Host']} in time") from None
        try:
            protocol = connection.protocol
            protocol.set_response_params(read_until_eof=True, auto_decompress=False, read_bufsize=2**18)
            if headers:
                head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
            if body is None:
                connection.transport.write(head + b"\r\n")
            else:
                connection.transport.writelines((b"%bContent-Length: %d\r\n\r\n" % (head, len(body)), body))
            while True:
                message, content = await protocol.read()
                if message.code >= 200:  # before it may come early hints
                    return Reply(message.code, message.headers, content, connection)
        except BaseException as error:
            connection.close()
            if isinstance(error, HttpProcessingError):
                raise aiohttp.ClientPayloadError(f"a reply that is not HTTP: {error.message}") from None
            raise

    def _target(self, method: str, url: str) -> tuple[aiohttp.ClientRequest, bytes]:
        loop, own = asyncio.get_running_loop(), {"Content-Type": "application/json"}
        request = aiohttp.ClientRequest(method, URL(url), headers=own, loop=loop)
        request.headers.popall("Accept-Encoding")  # nothing here decompresses
        request.headers.popall("Content-Length", None)
        lines = [f"{method} {request.url.raw_path_qs} HTTP/1.1", *(f"{k}: {v}" for k, v in request.headers.items()), ""]
        self._targets[method, url] = request, "\r\n".join(lines).encode()
        return self._targets[method, url]
