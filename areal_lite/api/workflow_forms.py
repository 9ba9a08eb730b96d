"""The forms of workflow that a user may give."""

from __future__ import annotations

from typing import Any, Protocol


class Workflow(Protocol):
    """An object that runs an episode on the engine; users subclass ``RolloutWorkflow``."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode."""


class Agent(Protocol):
    """Any object with this method; no base class is needed."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float] | None:
        """Run one episode and return its reward.

        ``extra_kwargs`` holds ``base_url``, ``api_key`` and ``http_client`` for an OpenAI SDK client.

        Returns:
            A finite number for the whole episode, rewards by completion id, or None to reject.
        """


WorkflowLike = Workflow | type[Any] | Agent | str
"""An instance, a class (with kwargs), an agent object or class, or a dotted path to any of them."""
