"""An ``httpx`` client that calls the agent service in this process: no sockets, and only JSON bodies are serialized.

It is of the library that the installed OpenAI SDK uses; other vendors' SDKs that use the same one take it, too.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from areal_lite.agents.doors.agent_service import AgentService, EventBody
from areal_lite.api.shared_resources import sdk_httpx

if TYPE_CHECKING:
    import httpx2 as httpx
else:
    httpx = sdk_httpx()

T = TypeVar("T")
BASE_URL = "http://areal-lite.local/v1"


class ServiceTransport(httpx.AsyncBaseTransport):
    """Passes each request to an agent service in the same process."""

    def __init__(self, service: AgentService, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._service = service
        self._loop = loop

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        answer = self._service.handle(request.method, request.url.raw_path.decode(), request.headers, body)
        reply = await self._receive(request, answer)
        headers = dict(reply.headers)
        if isinstance(reply.body, bytes):
            return httpx.Response(reply.status, headers=headers, content=reply.body)
        return httpx.Response(
            reply.status, headers=headers, stream=_Stream(reply.body, partial(self._receive, request))
        )

    async def _receive(self, request: httpx.Request, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a part of the answer no longer than the client's timeout."""
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
                if self._loop is None or self._loop is asyncio.get_running_loop() or self._loop.is_closed():
                    return await coroutine
                # In an empty context, so that the session runs the call as its own and ends it with the episode.
                return await asyncio.wrap_future(Context().run(asyncio.run_coroutine_threadsafe, coroutine, self._loop))
        except TimeoutError as error:
            raise httpx.ReadTimeout("the model did not answer in time", request=request) from error


class _Stream(httpx.AsyncByteStream):
    def __init__(self, body: EventBody, receive: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]) -> None:
        self._body = body
        self._events = aiter(body)
        self._receive = receive

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self._receive(self._next())) is not None:
            yield chunk

    async def _next(self) -> bytes | None:
        return await anext(self._events, None)

    async def aclose(self) -> None:
        await self._receive(self._body.aclose())


class SharedClient(httpx.AsyncClient):
    """One client for all episodes of a process, without sockets, for any event loop. Closing it does nothing, so no
    agent closes another's. It waits for answers without limit, unless a request or SDK client sets a timeout."""

    def __init__(self, service: AgentService, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(transport=ServiceTransport(service, loop), base_url=BASE_URL, trust_env=False, timeout=None)

    async def aclose(self) -> None:
        pass

    async def __aenter__(self) -> "SharedClient":
        return self

    async def __aexit__(self, *error: Any) -> None:
        pass


def socket_client(*, is_async: bool) -> Any:
    """Return a plain client that uses sockets and no proxy."""
    return (httpx.AsyncClient if is_async else httpx.Client)(trust_env=False, timeout=None)
