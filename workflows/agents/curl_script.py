"""An agent in a subprocess: a shell script that calls the model with curl."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from typing import Any

from areal_lite import workflow_context

SCRIPT = """
curl --silent --show-error --fail-with-body --no-buffer "$OPENAI_BASE_URL/chat/completions" \\
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" --data @-
"""


class CurlAgent:
    """Reward 1 if the last number of the answer is the right one.

    Args:
        stream: Whether to stream the answer.
    """

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        messages = [{"role": "user", "content": data["question"]}]
        body = {"model": "default", "messages": messages, "stream": self.stream}
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, **workflow_context.get().agent.environment}
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", SCRIPT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe
        )
        try:
            printed, errors = await process.communicate(json.dumps(body).encode())
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.kill()
        if process.returncode:
            raise RuntimeError(f"curl exited with {process.returncode}: {errors.decode()} {printed.decode()}")
        numbers = re.findall(r"-?\d+", self.answer(printed.decode()))
        return float(bool(numbers) and numbers[-1] == data["answer"])

    def answer(self, printed: str) -> str:
        """Return the answer's text; a stream has lines `data: {...}` and ends with `data: [DONE]`."""
        if not self.stream:
            return str(json.loads(printed)["choices"][0]["message"]["content"])
        chunks = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
