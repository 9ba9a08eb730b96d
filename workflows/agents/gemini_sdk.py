"""The Google Gen AI SDK: a tool, streaming, and a structured result, with Gemini's generateContent."""

from __future__ import annotations
import json
from typing import Any
from google import genai
from google.genai import types
from areal_lite import workflow_context

MAX_CALLS = 4
INTEGER = {"type": "INTEGER"}
NUMBERS: Any = {"type": "OBJECT", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
MULTIPLY = types.FunctionDeclaration(name="multiply", description="Multiply two whole numbers.", parameters=NUMBERS)
RESULT = {"type": "object", "properties": {"result": {"type": "integer"}}, "required": ["result"]}


class GeminiAgent:
    """Reward 1 for the right result, 0 for a wrong one or for an answer that breaks its schema."""

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream

    async def run(self, data: dict[str, Any], **_: Any) -> float:
        access = workflow_context.get().agent
        options = types.HttpOptions(base_url=access.anthropic_base_url)  # the listener's root, without /v1
        async with genai.Client(api_key=access.api_key, http_options=options).aio as client:
            return await self.solve(client, data)

    async def solve(self, client: Any, data: dict[str, Any]) -> float:
        contents = [types.UserContent(data["question"])]
        try:
            for _ in range(MAX_CALLS):
                parts = await self.ask(client, contents)
                calls = [part.function_call for part in parts if part.function_call]
                if not calls:
                    text = "".join(part.text or "" for part in parts if not part.thought)
                    return float(json.loads(text)["result"] == int(data["answer"]))
                products = [(call.name, call.args["a"] * call.args["b"]) for call in calls]
                results = [types.Part.from_function_response(name=n, response={"output": str(x)}) for n, x in products]
                contents += [types.ModelContent(parts), types.UserContent(results)]
        except (ValueError, KeyError, TypeError):  # the model's mistake
            pass
        return 0.0

    async def ask(self, client: Any, contents: list[Any]) -> list[types.Part]:
        config = types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=[MULTIPLY])],
            max_output_tokens=512,
            response_mime_type="application/json",
            response_json_schema=RESULT,
        )
        request: Any = {"model": "default", "contents": contents, "config": config}
        if not self.stream:
            answer = await client.models.generate_content(**request)
            return answer.candidates[0].content.parts
        chunks = [chunk async for chunk in await client.models.generate_content_stream(**request)]
        return [part for chunk in chunks for part in chunk.candidates[0].content.parts or []]
