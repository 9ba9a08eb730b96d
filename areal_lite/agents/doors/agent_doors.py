"""The ways into the agent service of a run: an in-process HTTP client, and a loopback listener for everything else."""

from __future__ import annotations

import asyncio

from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.doors.http_transport import SharedClient
from areal_lite.agents.doors.listener import Listener
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.api.shared_resources import SharedResources


class AgentDoors:
    """An agent service with both of its doors; one serves all agents of a run."""

    def __init__(self) -> None:
        self.service = AgentService()
        self._client = SharedClient(self.service, asyncio.get_running_loop())
        self._listener = Listener(self.service)

    @classmethod
    async def open(cls, shared: SharedResources | None = None) -> AgentDoors:
        """Return open doors on this event loop; ``shared`` says when the loop is blocked."""
        doors = cls()
        await doors._listener.open()
        if shared is not None:
            shared.while_blocked.append(doors._refuse)
        return doors

    async def aclose(self) -> None:
        await self._listener.close()

    def access(self, key: str) -> AgentAccess:
        """Return what the agent of the session of ``key`` needs."""
        return AgentAccess(
            base_url=f"{self._listener.url}/v1",
            anthropic_base_url=self._listener.url,
            api_key=key,
            http_client=self._client,
        )

    def _refuse(self, blocking: AgentAccess | None, message: str) -> None:
        if blocking is not None:
            self._listener.refuse(blocking.api_key, message)
