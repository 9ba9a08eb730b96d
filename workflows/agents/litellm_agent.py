"""LiteLLM: one function for all vendors, here with a tool and a structured result."""

from __future__ import annotations
import json
from typing import Any
import litellm
from pydantic import BaseModel, ValidationError

MAX_CALLS = 4
INTEGER = {"type": "integer"}
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two whole numbers.",
        "parameters": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]},
    },
}


class Result(BaseModel):
    result: int


class LiteLLMAgent:
    """Reward 1 for the right result, 0 for a wrong one or for an answer that breaks its schema.

    Args:
        stream: Whether to stream the answers.
    """

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        request: Any = {"model": "openai/default", "api_base": base_url, "api_key": api_key}
        request |= {"tools": [MULTIPLY], "response_format": Result, "stream": self.stream}
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        try:
            for _ in range(MAX_CALLS):
                reply: Any = await litellm.acompletion(messages=messages, **request)
                if self.stream:
                    reply = litellm.stream_chunk_builder([chunk async for chunk in reply], messages)
                answer = reply.choices[0].message
                if not answer.tool_calls:
                    return float(Result.model_validate_json(answer.content).result == int(data["answer"]))
                messages.append(answer)
                for call in answer.tool_calls:
                    numbers = json.loads(call.function.arguments)
                    content = str(numbers["a"] * numbers["b"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        except (ValidationError, ValueError, KeyError, TypeError):  # the model's mistake
            pass
        return 0.0
