"""An agent in JavaScript: node_agent.mjs in a subprocess. Copy both into a folder and `npm install openai` there."""

from __future__ import annotations
from pathlib import Path
from typing import Any
from areal_lite import workflow_context


class NodeAgent:
    """Reward 1 if the script prints the right result.

    Args:
        script: The JavaScript file; ``node_modules`` is next to it.
        stream: Whether to stream the answers.
    """

    def __init__(self, script: str | Path = "node_agent.mjs", stream: bool = False) -> None:
        self.script = Path(script).resolve()
        self.stream = stream

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        command = ["node", str(self.script), data["question"], *(["stream"] if self.stream else [])]
        process = await workflow_context.get().agent.run_process(command)
        if process.returncode and "SyntaxError" not in process.stderr:  # JSON that the model wrote wrong
            raise RuntimeError(f"node exited with {process.returncode}: {process.stderr}")
        return float(process.stdout.strip() == data["answer"])
