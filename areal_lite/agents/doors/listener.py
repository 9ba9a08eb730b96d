"""A loopback HTTP listener for agents that cannot use the in-process transport: other SDKs, threads, processes.

Guarantees that only programs on this machine reach it, and no page in a browser: it listens on 127.0.0.1 and checks
Host, Origin and content type. Connections, headers, bodies and the time to send them are limited. Errors are JSON,
and neither they nor the logs contain what a client sent in its headers.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Self
import orjson
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from areal_lite.agents.doors.agent_service import MAX_BODY_BYTES, AgentService, Reply, error_reply
from areal_lite.agents.doors.api import Api
from areal_lite.agents.doors.http_transport import SharedClient
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.api.shared_resources import SharedResources
from areal_lite.processes.browser_guard import loopback_names, refusal_of
from areal_lite.processes.http_limits import BodyError, HttpLimits, SurplusConnection, read_body

logger = logging.getLogger(__name__)
_HOST = "127.0.0.1"
_HOST_NAMES = loopback_names(_HOST)
_LIMITS = HttpLimits(max_body_bytes=MAX_BODY_BYTES)
_MAX_HEAD_BYTES = 1 << 16
_BODY_SECONDS = 1.0


class Listener:
    """Serves an agent service on ``port`` of 127.0.0.1, 0 for a free one, on the running event loop."""

    def __init__(self, service: AgentService, limits: HttpLimits = _LIMITS, *, port: int = 0) -> None:
        self.service = service
        self._limits = limits
        self.port = port

    async def open(self, shared: SharedResources | None = None) -> Self:
        """Start to listen; ``shared`` says when the loop is blocked."""
        server = _Server(self._handle, self._limits)
        self._runner = web.ServerRunner(server, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        listening = socket.create_server((_HOST, self.port), backlog=4096)
        self.port = listening.getsockname()[1]
        await web.SockSite(self._runner, listening, backlog=4096).start()
        self._responder = _BlockedLoopResponder(listening, server)
        self._client = SharedClient(self.service, asyncio.get_running_loop())
        if shared is not None:
            shared.while_blocked.append(self._refuse)
        return self

    async def close(self) -> None:
        self._responder.close()
        await self._runner.cleanup()

    def access(self, key: str) -> AgentAccess:
        url = f"http://{_HOST}:{self.port}"
        return AgentAccess(base_url=f"{url}/v1", anthropic_base_url=url, api_key=key, http_client=self._client)

    def _refuse(self, blocking: AgentAccess | None, message: str) -> None:
        """Answer 503 to waiting requests of an agent that blocks the loop and so waits for itself."""
        if blocking is not None:
            error = Api.error(RequestError(message, status=503, code="event_loop_blocked"))
            self._responder.refuse(blocking.api_key, error)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            _check(request)
            body = await self._read(request) if request.can_read_body else b""
        except RequestError as error:
            return _error_response(error, request.raw_path)
        # The raw path is not decoded: an encoded path is not served.
        reply = await self.service.handle(request.method, request.raw_path, request.headers, body)
        return await send_reply(request, reply)

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
    has_body = request.method == "POST" or request.can_read_body
    if (refusal := refusal_of(request.headers, has_body=has_body, host_names=_HOST_NAMES)) is not None:
        raise RequestError(refusal.message, status=refusal.status)
    if request.headers.get("Content-Encoding", "identity") != "identity":
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
    def __init__(self, handler: Any, limits: HttpLimits) -> None:
        self._max_connections = limits.max_connections
        self._options: dict[str, Any] = {"access_log": None, "auto_decompress": False, "lingering_time": 1}
        self._options["keepalive_timeout"] = limits.request_timeout_s
        super().__init__(handler, handler_cancellation=True, **self._options)

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


async def send_reply(request: web.BaseRequest, reply: Reply) -> web.StreamResponse:
    """Send a reply; a client that leaves a streamed one ends the generation."""
    if isinstance(reply.body, bytes):
        return web.Response(status=reply.status, headers=reply.headers, body=reply.body)
    response = web.StreamResponse(status=reply.status, headers=reply.headers)
    response._send_headers_immediately = False  # but with the first events
    try:
        with contextlib.suppress(ConnectionResetError):
            await response.prepare(request)
            async for events in reply.body:
                await response.write(events)
            await response.write_eof()
    finally:
        await reply.body.aclose()
    return response


class _BlockedLoopResponder:
    """Accepts connections in place of a blocked event loop; ``refuse`` is for another thread, the rest for the loop.

    Guarantees that only the session whose code blocks the loop is refused: the loop serves others when it runs again.
    """

    def __init__(self, listening: socket.socket, protocol: Callable[[], Any]) -> None:
        self._listening: socket.socket | None = listening  # shared with the loop, whose protocol serves connections
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._accepted: deque[socket.socket] = deque()
        """Connections of nobody yet; whoever takes one out, this thread or the loop, owns it."""
        self._adopting: set[asyncio.Task[Any]] = set()

    def close(self) -> None:
        self._listening = None
        while self._accepted:
            self._accepted.popleft().close()

    def refuse(self, key: str, error: dict[str, Any]) -> None:
        """Answer 503 with ``error`` to waiting requests that carry ``key``; leave the others to the loop."""
        if (listening := self._listening) is None:
            return
        with contextlib.suppress(OSError):  # none is waiting, or the listener is closed
            while True:
                connection, _ = listening.accept()
                connection.setblocking(False)
                self._accepted.append(connection)
        for _ in range(len(self._accepted)):
            try:
                connection = self._accepted.popleft()
            except IndexError:  # the loop runs again and took them
                return
            head = b""
            with contextlib.suppress(OSError):  # as far as it has arrived
                head = connection.recv(_MAX_HEAD_BYTES, socket.MSG_PEEK).partition(b"\r\n\r\n")[0]
            if key.encode() in head:
                _answer(connection, orjson.dumps(error))
            else:
                self._accepted.append(connection)
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._adopt)

    def _adopt(self) -> None:
        while self._accepted:
            connection = self._accepted.popleft()
            if self._listening is None:
                connection.close()
                continue
            task = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, connection))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)


def _answer(connection: socket.socket, body: bytes) -> None:
    """Read the request, answer it and close; a client that is still sending would miss the answer."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_BODY_SECONDS)
        head, _, rest = connection.recv(_MAX_HEAD_BYTES).partition(b"\r\n\r\n")
        sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        missing = (int(sizes[0].partition(b":")[2]) if sizes else 0) - len(rest)
        with contextlib.suppress(TimeoutError):
            while missing > 0 and (piece := connection.recv(1 << 16)):
                missing -= len(piece)
        connection.sendall(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nx-should-retry: false\r\n"
            b"connection: close\r\ncontent-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
