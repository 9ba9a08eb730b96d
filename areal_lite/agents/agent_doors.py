"""The ways into the agent service of a run: an in-process HTTP client, and a loopback listener for everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal_lite.agents.agent_service import AgentService
from areal_lite.agents.http_transport import SharedClient
from areal_lite.agents.listener import Listener


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAccess:
    """How one episode's agent reaches its session; valid until ``run()`` returns."""

    base_url: str
    """Of OpenAI's APIs: ``http://127.0.0.1:PORT/v1``."""
    anthropic_base_url: str
    """Of Anthropic's API: ``http://127.0.0.1:PORT``."""
    api_key: str
    http_client: Any
    """An ``httpx.AsyncClient`` that needs no sockets; SDKs take it as ``http_client``."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that SDKs read; give them to a subprocess."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


class AgentDoors:
    """An agent service with both of its doors; one serves all agents of a run."""

    def __init__(self) -> None:
        self.service = AgentService()
        self._client = SharedClient(self.service)
        self._listener = Listener(self.service)

    @classmethod
    async def open(cls) -> AgentDoors:
        """Return open doors; the listener runs on this event loop."""
        doors = cls()
        await doors._listener.open()
        return doors

    async def aclose(self) -> None:
        """Stop to listen."""
        await self._listener.close()

    def access(self, key: str) -> AgentAccess:
        """Return what the agent of the session of ``key`` needs."""
        return AgentAccess(
            base_url=f"{self._listener.url}/v1",
            anthropic_base_url=self._listener.url,
            api_key=key,
            http_client=self._client,
        )
