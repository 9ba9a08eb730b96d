"""The OpenAI SDK: a tool, streaming, and a structured result."""

from __future__ import annotations
from typing import Any
from openai import AsyncOpenAI, LengthFinishReasonError, pydantic_function_tool
from pydantic import BaseModel, ValidationError

MAX_CALLS = 4


class Multiply(BaseModel):
    """Multiply two whole numbers."""

    a: int
    b: int


class Result(BaseModel):
    result: int


class OpenAIAgent:
    """Reward 1 for the right result, 0 for a wrong one or for an answer that breaks its schema."""

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
            return await self.solve(client, data)

    async def solve(self, client: AsyncOpenAI, data: dict[str, Any]) -> float:
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        try:
            for _ in range(MAX_CALLS):
                answer = await self.ask(client, messages)
                if not answer.tool_calls:
                    return float(answer.parsed.result == int(data["answer"]))
                messages.append(answer)
                for call in answer.tool_calls:
                    numbers = call.function.parsed_arguments
                    content = str(numbers.a * numbers.b)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        except (ValidationError, LengthFinishReasonError):  # the model's mistake
            pass
        return 0.0

    async def ask(self, client: AsyncOpenAI, messages: list[Any]) -> Any:
        request: Any = {"model": "default", "messages": messages, "response_format": Result}
        request["tools"] = [pydantic_function_tool(Multiply, name="multiply")]
        if not self.stream:
            return (await client.chat.completions.parse(**request)).choices[0].message
        async with client.chat.completions.stream(**request) as stream:
            return (await stream.get_final_completion()).choices[0].message
