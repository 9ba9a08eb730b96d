"""Context of the running episode: its place in the run, its metric scope, shared HTTP clients.

Each episode has its own context, also each member of a group; tasks that it starts inherit a copy.
"""

from typing import TYPE_CHECKING
from areal_lite.api.episode_context import EpisodeContext as WorkflowContext
from areal_lite.api.episode_context import current as get
from areal_lite.api.episode_context import enter as set
from areal_lite.api.episode_context import record_scalars
from areal_lite.api.shared_resources import SharedResources, sdk_httpx
from areal_lite.api.trajectory import scope_name

if TYPE_CHECKING:
    import aiohttp
    import httpx2

__all__ = ["WorkflowContext", "get", "get_aiohttp_session", "get_httpx_client", "record", "set", "stat_scope"]


def stat_scope() -> str:
    """Return the metric scope of this episode: ``rollout`` or ``eval-rollout``."""
    return scope_name(get().is_eval)


def record(**values: float) -> None:
    """Record numbers of this episode; means over accepted episodes are metrics ``SCOPE/NAME`` of step or evaluation."""
    record_scalars({f"{stat_scope()}/{name}": value for name, value in values.items()})


async def get_aiohttp_session() -> "aiohttp.ClientSession":
    """Return the engine's shared aiohttp session, inside an episode; never close it."""

    async def make() -> "aiohttp.ClientSession":
        import aiohttp

        return aiohttp.ClientSession()

    return await _shared().get("aiohttp", make)


async def get_httpx_client() -> "httpx2.AsyncClient":
    """Return the engine's shared client of :func:`sdk_httpx`, inside an episode; never close it."""

    async def make() -> "httpx2.AsyncClient":
        httpx = sdk_httpx()
        client: httpx2.AsyncClient = httpx.AsyncClient(limits=httpx.Limits(max_connections=4096), timeout=600)
        return client

    return await _shared().get("httpx", make)


def _shared() -> SharedResources:
    shared = get().shared
    if shared is None:
        raise RuntimeError(
            "the shared HTTP clients exist inside an episode only, on the engine's event loop: outside, in threads "
            "and in processes (rollout.agents.isolation), open a session of your own"
        )
    return shared
