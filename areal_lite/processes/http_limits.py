"""Limits on what a client can hold open at an HTTP server in this process: connections, heads and bodies.

aiohttp's keepalive timeout closes connections that are idle or wait for the rest of a head; it limits neither the time
of a body nor the number of connections.
"""

import asyncio
from dataclasses import dataclass
from typing import Any
from aiohttp import web


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """The limits of one server."""

    max_body_bytes: int
    request_timeout_s: float = 30.0
    """Seconds for a head, for a body, and between two requests of a connection."""
    max_connections: int = 8192


class BodyError(Exception):
    """A body that is too large, too slow or broken, with the HTTP status to answer."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


async def read_body(request: web.BaseRequest, limits: HttpLimits) -> bytes:
    """Return the body of a request; raises BodyError."""
    most = limits.max_body_bytes
    if (request.content_length or 0) > most:
        raise BodyError(f"the body has {request.content_length} bytes: at most {most}", status=413)
    if request.content.is_eof():
        return request.content.read_nowait()
    body = bytearray()
    try:
        async with asyncio.timeout(limits.request_timeout_s):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > most:
                    raise BodyError(f"the body has more than {most} bytes", status=413)
    except TimeoutError:
        raise BodyError(f"the body did not arrive within {limits.request_timeout_s:g} s", status=408) from None
    except web.RequestPayloadError:
        raise BodyError("the body is not valid HTTP: send what Content-Length announces", status=400) from None
    return bytes(body)


class SurplusConnection(asyncio.Protocol):
    """Answers 503 with a JSON body and closes, for a connection over the limit."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def connection_made(self, transport: Any) -> None:
        head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
        transport.write(f"{head}content-length: {len(self._body)}\r\n\r\n".encode() + self._body)
        transport.close()
