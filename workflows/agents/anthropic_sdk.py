"""The Anthropic SDK: a tool, streaming, and a structured result, with the Messages API."""

from __future__ import annotations
from typing import Any
from anthropic import AsyncAnthropic
from pydantic import BaseModel, ValidationError
from areal_lite import workflow_context

MAX_CALLS = 4
INTEGER = {"type": "integer"}
MULTIPLY: Any = {
    "name": "multiply",
    "description": "Multiply two whole numbers.",
    "input_schema": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]},
}


class Result(BaseModel):
    result: int


class AnthropicAgent:
    """Reward 1 for the right result, 0 for a wrong one or for an answer that breaks its schema."""

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        address = workflow_context.get().agent.anthropic_base_url  # base_url is for OpenAI's APIs
        async with AsyncAnthropic(base_url=address, api_key=api_key, http_client=http_client) as client:
            return await self.solve(client, data)

    async def solve(self, client: AsyncAnthropic, data: dict[str, Any]) -> float:
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        try:
            for _ in range(MAX_CALLS):
                answer = await self.ask(client, messages)
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    return float(answer.parsed_output.result == int(data["answer"]))
                products = [(call.id, str(call.input["a"] * call.input["b"])) for call in calls]
                results = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in products]
                messages += [{"role": "assistant", "content": answer.content}]
                messages += [{"role": "user", "content": results}]
        except (ValidationError, KeyError, TypeError):  # the model's mistake
            pass
        return 0.0

    async def ask(self, client: AsyncAnthropic, messages: list[Any]) -> Any:
        request: Any = {"model": "default", "max_tokens": 512, "messages": messages, "tools": [MULTIPLY]}
        if not self.stream:
            return await client.messages.parse(**request, output_format=Result)
        async with client.messages.stream(**request, output_format=Result) as stream:
            return await stream.get_final_message()
