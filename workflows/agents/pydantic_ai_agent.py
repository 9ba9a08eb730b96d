"""Pydantic AI: a tool and a typed result."""

from __future__ import annotations
from typing import Any
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

LIMITS = UsageLimits(request_limit=4)


class Result(BaseModel):
    result: int


# NativeOutput constrains the answer by its schema; without it, the result is the call of an output tool.
agent = Agent(output_type=NativeOutput(Result))


@agent.tool_plain
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


class PydanticAIAgent:
    """Reward 1 for the right result, 0 for a wrong one or for an answer that breaks its schema.

    Args:
        stream: Whether to stream the answers.
    """

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        provider = OpenAIProvider(base_url=base_url, api_key=api_key, http_client=http_client)
        model = OpenAIChatModel("default", provider=provider)
        question = data["question"]
        try:
            if self.stream:
                async with agent.run_stream(question, model=model, usage_limits=LIMITS) as stream:
                    output = await stream.get_output()
            else:
                output = (await agent.run(question, model=model, usage_limits=LIMITS)).output
        except (UnexpectedModelBehavior, UsageLimitExceeded):  # the model's mistake
            return 0.0
        return float(output.result == int(data["answer"]))
