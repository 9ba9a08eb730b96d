"""Context of the running episode: its place in the run, its metric scope, shared HTTP clients.

Each episode has its own context, also each member of a group; tasks that it starts inherit a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_lite.api.episode_context import EpisodeContext as WorkflowContext
from areal_lite.api.episode_context import current as get
from areal_lite.api.episode_context import enter as set
from areal_lite.api.scalars import record_scalars

if TYPE_CHECKING:
    import aiohttp
    import httpx2

__all__ = [
    "SharedHttp",
    "WorkflowContext",
    "get",
    "get_aiohttp_session",
    "get_httpx_client",
    "record",
    "set",
    "stat_scope",
]


def stat_scope() -> str:
    """Return the metric scope of this episode: ``rollout`` or ``eval-rollout``."""
    return scope_name(get().is_eval)


def record(**values: float) -> None:
    """Record numbers of this episode; their means are the metrics ``SCOPE/NAME`` of the step or evaluation.

    Raises:
        RuntimeError: Outside an episode.
    """
    record_scalars({f"{stat_scope()}/{name}": value for name, value in values.items()})


def scope_name(is_eval: bool) -> str:
    """Return the folder and metric scope of training or evaluation episodes."""
    return "eval-rollout" if is_eval else "rollout"


class SharedHttp:
    """One aiohttp session and one httpx client for all episodes of an engine, made on first use."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._client: httpx2.AsyncClient | None = None

    def aiohttp_session(self) -> aiohttp.ClientSession:
        """Return the shared session; the engine closes it."""
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession()
        return self._session

    def httpx_client(self) -> httpx2.AsyncClient:
        """Return the shared client; the engine closes it."""
        if self._client is None:
            import httpx2

            self._client = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=4096), timeout=600)
        return self._client

    async def close(self) -> None:
        """Close the clients that were opened."""
        if self._session is not None:
            await self._session.close()
        if self._client is not None:
            await self._client.aclose()


def _shared() -> SharedHttp:
    http: Any = get().http
    if http is None:
        raise RuntimeError(
            "the shared HTTP clients exist inside an episode only; outside, open a session of your own"
        )
    assert isinstance(http, SharedHttp)
    return http


async def get_aiohttp_session() -> aiohttp.ClientSession:
    """Return the engine's shared aiohttp session; never close it.

    Raises:
        RuntimeError: Outside an episode.
    """
    return _shared().aiohttp_session()


async def get_httpx_client() -> httpx2.AsyncClient:
    """Return the engine's shared httpx client; never close it.

    Raises:
        RuntimeError: Outside an episode.
    """
    return _shared().httpx_client()
