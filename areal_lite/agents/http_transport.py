"""An ``httpx`` client that calls the agent service in this process: no sockets, and only JSON bodies are serialized.

It is a client of the library that the installed OpenAI SDK uses: ``httpx`` up to version 2, ``httpx2`` since. Other
vendors' SDKs that use the same library take it, too.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from areal_lite.agents.agent_service import AgentService, EventBody

if TYPE_CHECKING or int(importlib.metadata.version("openai").partition(".")[0]) > 2:
    import httpx2 as httpx
else:
    import httpx

BASE_URL = "http://areal-lite.local/v1"


class ServiceTransport(httpx.AsyncBaseTransport):
    """Passes each request to an agent service in the same process."""

    def __init__(self, service: AgentService) -> None:
        self._service = service

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one request; ``httpx`` calls this."""
        body = await request.aread()
        reply = await self._service.handle(request.method, request.url.path, request.headers, body)
        if isinstance(reply.body, bytes):
            return httpx.Response(reply.status, headers=dict(reply.headers), content=reply.body)
        return httpx.Response(reply.status, headers=dict(reply.headers), stream=_Stream(reply.body))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, body: EventBody) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()


class SharedClient(httpx.AsyncClient):
    """One client for all episodes of a process, without sockets and for any event loop.

    Closing it does nothing, so an agent that closes its SDK client does not close those of other agents.
    """

    def __init__(self, service: AgentService) -> None:
        super().__init__(transport=ServiceTransport(service), base_url=BASE_URL, trust_env=False)

    async def aclose(self) -> None:
        """Do nothing."""

    async def __aenter__(self) -> SharedClient:
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Do nothing."""
