"""An agent in a subprocess: a shell script that calls the model with curl."""

from __future__ import annotations
import json
import re
from typing import Any
from areal_lite import workflow_context

SCRIPT = """
printf %s "$REQUEST" | curl --silent --show-error --fail-with-body --no-buffer "$OPENAI_BASE_URL/chat/completions" \\
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
        request = json.dumps({"model": "default", "messages": messages, "stream": self.stream})
        agent = workflow_context.get().agent
        process = await agent.run_process(["sh", "-c", SCRIPT], variables={"REQUEST": request})
        if process.returncode:
            raise RuntimeError(f"curl exited with {process.returncode}: {process.stderr} {process.stdout}")
        numbers = re.findall(r"-?\d+", self.answer(process.stdout))
        return float(bool(numbers) and numbers[-1] == data["answer"])

    def answer(self, printed: str) -> str:
        """Return the answer's text; a stream has lines `data: {...}` and ends with `data: [DONE]`."""
        if not self.stream:
            return str(json.loads(printed)["choices"][0]["message"]["content"])
        chunks = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
