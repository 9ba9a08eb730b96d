"""A loopback HTTP listener for agents that cannot use the in-process transport: other SDKs, threads, processes.

Guarantees that only programs on this machine reach it, and no page in a browser: it listens on 127.0.0.1, checks
the Host header, refuses requests with an Origin, and takes JSON with its content type only.
"""

from __future__ import annotations

import contextlib
import socket

from aiohttp import web

from areal_lite.agents.agent_service import MAX_BODY_BYTES, AgentService, Reply
from areal_lite.agents.apis.api import openai_error
from areal_lite.agents.blocked_door import BlockedDoor
from areal_lite.agents.request_fields import RequestError

_HEADER_SECONDS = 30.0
"""Seconds a client has to send its request."""
_HOSTS = ("127.0.0.1", "localhost")


class Listener:
    """Serves an agent service on an ephemeral port of 127.0.0.1, on the running event loop."""

    def __init__(self, service: AgentService) -> None:
        self._service = service
        self._runner: web.ServerRunner | None = None
        self._door = BlockedDoor()
        self.port = 0

    async def open(self) -> None:
        """Start to listen."""
        server = web.Server(
            self._handle,
            access_log=None,
            keepalive_timeout=75,
            lingering_time=1,
        )
        self._runner = web.ServerRunner(server, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port = listening.getsockname()[1]
        await web.SockSite(self._runner, listening, backlog=4096).start()
        self._door.open(listening, server)

    async def close(self) -> None:
        """Stop to listen and end all requests."""
        self._door.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def refuse(self, key: str, message: str) -> None:
        """Answer 503 to waiting requests of the session of ``key``; for another thread, while the loop is blocked."""
        self._door.refuse(key, openai_error(RequestError(message, status=503, code="event_loop_blocked")))

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``; OpenAI's APIs are below ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            self._check(request)
            body = await _read(request)
        except RequestError as error:
            return web.json_response(openai_error(error), status=error.status)
        reply = await self._service.handle(request.method, request.path, request.headers, body)
        if isinstance(reply.body, bytes):
            return web.Response(status=reply.status, headers=dict(reply.headers), body=reply.body)
        return await _send_stream(request, reply)

    def _check(self, request: web.BaseRequest) -> None:
        """Refuse what a page in a browser could send."""
        host, _, port = request.headers.get("Host", "").partition(":")
        if host not in _HOSTS or port != str(self.port):
            raise RequestError(
                f"the Host is {request.headers.get('Host', '')[:80]!r}: use {self.url}", status=403
            )
        if "Origin" in request.headers:
            raise RequestError("requests with an Origin are not served: agents are no web pages", status=403)
        if request.method == "POST" and request.content_type != "application/json":
            raise RequestError(
                f"the content type is {request.content_type[:80]!r}: send application/json", status=415
            )


async def _read(request: web.BaseRequest) -> bytes:
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise RequestError(
            f"the body has {request.content_length} bytes: at most {MAX_BODY_BYTES}", status=413
        )
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)


async def _send_stream(request: web.BaseRequest, reply: Reply) -> web.StreamResponse:
    assert not isinstance(reply.body, bytes)
    response = web.StreamResponse(status=reply.status, headers=dict(reply.headers))
    try:
        with contextlib.suppress(ConnectionResetError):
            await response.prepare(request)
            async for events in reply.body:
                await response.write(events)
            await response.write_eof()
    finally:
        await reply.body.aclose()
    return response
