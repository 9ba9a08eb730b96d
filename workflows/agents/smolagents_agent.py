"""smolagents: a synchronous agent, so it runs in a thread and calls the model by its address."""

from __future__ import annotations
import asyncio
from typing import Any
from rich.console import Console
from smolagents import AgentError, AgentLogger, LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a * b


class SmolAgent:
    """Reward 1 for the right result.

    Args:
        stream: Whether to stream the answers.
    """

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        model = OpenAIModel("default", api_base=base_url, api_key=api_key)
        quiet = AgentLogger(LogLevel.OFF, console=Console(quiet=True))
        agent = ToolCallingAgent([multiply], model, stream_outputs=self.stream, max_steps=4, logger=quiet)
        try:
            answer = await asyncio.to_thread(agent.run, data["question"])
        except AgentError:
            return 0.0
        return float(str(answer).strip() == data["answer"])
