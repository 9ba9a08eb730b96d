"""An agent in JavaScript: node_agent.mjs in a subprocess. Copy both into a folder and `npm install openai` there."""

from __future__ import annotations

import asyncio
import contextlib
import os
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
        self.script = script
        self.stream = stream

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        environment = {**os.environ, **workflow_context.get().agent.environment}
        arguments = [str(self.script), data["question"], *(["stream"] if self.stream else [])]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "node", *arguments, env=environment, stdout=pipe, stderr=pipe
        )
        try:
            printed, errors = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.kill()
        if process.returncode and b"SyntaxError" not in errors:  # JSON that the model wrote wrong
            raise RuntimeError(f"node exited with {process.returncode}: {errors.decode()}")
        return float(printed.decode().strip() == data["answer"])
