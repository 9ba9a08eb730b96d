"""OpenAI's Agents SDK (openai-agents) on its default API, Responses: one agent hands the question to another."""

from __future__ import annotations
from typing import Any
from agents import Agent, AgentsException, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel

MAX_TURNS = 6


class Result(BaseModel):
    result: int


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


calculator = Agent(name="calculator", instructions="Multiply with the tool.", tools=[multiply], output_type=Result)
reception = Agent(
    name="reception", instructions="Hand questions about numbers to the calculator.", handoffs=[calculator]
)


class HandoffAgent:
    """Reward 1 for the right result. Two agents with instructions of their own leave two sequences.

    Args:
        stream: Whether to stream the answers.
    """

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        question: Any = data["question"]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
            model = OpenAIProvider(openai_client=client)
            config = RunConfig(model_provider=model, model="default", tracing_disabled=True)
            try:
                if self.stream:
                    result: Any = Runner.run_streamed(reception, question, run_config=config, max_turns=MAX_TURNS)
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await Runner.run(reception, question, run_config=config, max_turns=MAX_TURNS)
            except AgentsException:  # too many turns, or an answer that breaks its schema
                return 0.0
        output = result.final_output
        return float(isinstance(output, Result) and output.result == int(data["answer"]))
