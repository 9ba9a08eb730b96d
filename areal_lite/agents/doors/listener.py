"""A loopback HTTP listener for agents that cannot use the in-process transport: other SDKs, threads, processes.

Guarantees that only programs on this machine reach it, and no page in a browser: it listens on 127.0.0.1 and checks
Host, Origin and content type. Connections, headers, bodies and the time to send them are limited. Errors are JSON,
and neither they nor the logs contain what a client sent in its headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong

from areal_lite.agents.doors.agent_service import MAX_BODY_BYTES, AgentService, Reply, error_reply
from areal_lite.agents.doors.api import Api
from areal_lite.agents.doors.blocked_loop_responder import BlockedLoopResponder
from areal_lite.agents.doors.http_transport import SharedClient
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.api.shared_resources import SharedResources
from areal_lite.processes.browser_guard import loopback_names, refusal_of
from areal_lite.processes.http_limits import BodyError, HttpLimits, SurplusConnection, read_body

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_HOST_NAMES = loopback_names(_HOST)


class Listener:
    """Serves an agent service on an ephemeral port of 127.0.0.1, on the running event loop; one for all agents."""

    def __init__(self, service: AgentService, *, request_timeout_s: float = 30.0, max_connections: int = 8192) -> None:
        self.service = service
        self._limits = HttpLimits(
            max_body_bytes=MAX_BODY_BYTES, request_timeout_s=request_timeout_s, max_connections=max_connections
        )
        self._runner: web.ServerRunner | None = None
        self._responder: BlockedLoopResponder | None = None
        self.port = 0

    async def open(self, shared: SharedResources | None = None) -> Listener:
        """Start to listen; ``shared`` says when the loop is blocked."""
        server = _Server(
            self._handle,
            max_connections=self._limits.max_connections,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self._limits.request_timeout_s,
            lingering_time=1,
        )
        self._runner = web.ServerRunner(server, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        listening = socket.create_server((_HOST, 0), backlog=4096)
        self.port = listening.getsockname()[1]
        await web.SockSite(self._runner, listening, backlog=4096).start()
        self._responder = BlockedLoopResponder(listening, server)
        self._client = SharedClient(self.service, asyncio.get_running_loop())
        if shared is not None:
            shared.while_blocked.append(self._refuse)
        return self

    async def close(self) -> None:
        if self._runner is not None and self._responder is not None:
            self._responder.close()
            await self._runner.cleanup()

    def access(self, key: str) -> AgentAccess:
        url = f"http://{_HOST}:{self.port}"
        return AgentAccess(base_url=f"{url}/v1", anthropic_base_url=url, api_key=key, http_client=self._client)

    def _refuse(self, blocking: AgentAccess | None, message: str) -> None:
        """Answer 503 to waiting requests of an agent that blocks the loop and so waits for itself."""
        if blocking is not None and self._responder is not None:
            error = Api.error(RequestError(message, status=503, code="event_loop_blocked"))
            self._responder.refuse(blocking.api_key, error)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]  # not decoded: an encoded path is not served
        try:
            _check(request)
            body = await self._read(request) if request.can_read_body else b""
        except RequestError as error:
            return _error_response(error, path)
        reply = await self.service.handle(request.method, request.raw_path, request.headers, body)
        if not isinstance(reply.body, bytes):
            return await send_stream(request, reply)
        if request.keep_alive and request.version == HttpVersion11:
            return _WholeResponse(reply)
        return web.Response(status=reply.status, headers=reply.headers, body=reply.body)

    async def _read(self, request: web.BaseRequest) -> bytes:
        fits = (request.content_length or 0) <= self._limits.max_body_bytes
        if fits and request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        try:
            return await read_body(request, self._limits)
        except BodyError as error:
            raise RequestError(str(error), status=error.status) from None


def _check(request: web.BaseRequest) -> None:
    if request.method not in ("GET", "POST", "DELETE"):
        raise RequestError(f"{request.method[:20]} is not served: use GET, POST or DELETE", status=405)
    headers = request.headers
    has_body = request.method == "POST" or request.can_read_body
    if (refusal := refusal_of(headers, has_body=has_body, host_names=_HOST_NAMES)) is not None:
        raise RequestError(refusal.message, status=refusal.status)
    if headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError("the body is compressed: send it without Content-Encoding", status=415)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is not HTTP, and errors of our own. aiohttp's log of it would quote headers."""
        if status == 500:
            logger.error("a request failed", exc_info=exc)
            if request.writer.output_size:
                raise ConnectionResetError("the response has begun")
            return _error_response(RequestError("the agent service failed: see its log", status=500))
        if isinstance(exc, LineTooLong):
            return _error_response(RequestError("the head is too long: send shorter headers", status=431))
        return _error_response(RequestError("the request is not valid HTTP/1.1", status=status))


class _Server(web.Server):
    def __init__(self, handler: Any, *, max_connections: int, **options: Any) -> None:
        super().__init__(handler, handler_cancellation=True, **options)
        self._max_connections = max_connections
        self._options = options

    def __call__(self) -> Any:
        if len(self._connections) >= self._max_connections:
            error = RequestError("too many connections: close some", status=503, code="too_many_connections")
            return SurplusConnection(orjson.dumps(Api.error(error)))
        return _Connection(self, loop=self._loop, **self._options)


def _error_response(error: RequestError, path: str = "") -> web.Response:
    """Return an error's response, after which the connection closes."""
    reply = error_reply(path, error)
    response = web.Response(status=reply.status, headers=reply.headers, body=reply.body)
    response.force_close()
    return response


class _WholeResponse(web.StreamResponse):
    """A response in one write, on a connection that stays open; aiohttp's own takes several times the CPU."""

    _keep_alive = True

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self._reply = reply

    async def prepare(self, request: web.BaseRequest) -> Any:
        status, headers, body = self._reply
        assert isinstance(body, bytes)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}content-length: {len(body)}\r\n\r\n"
        await request.writer.write(head.encode() + body)
        await request.writer.drain()

    async def write_eof(self, data: bytes = b"") -> None:
        pass


class _StreamedResponse(web.StreamResponse):
    _send_headers_immediately = False  # with the first events


async def send_stream(request: web.BaseRequest, reply: Reply) -> web.StreamResponse:
    """Send a streamed reply; a client that leaves ends the generation."""
    assert not isinstance(reply.body, bytes)
    response = _StreamedResponse(status=reply.status, headers=reply.headers)
    try:
        with contextlib.suppress(ConnectionResetError):
            await response.prepare(request)
            async for events in reply.body:
                await response.write(events)
            await response.write_eof()
    finally:
        await reply.body.aclose()
    return response
