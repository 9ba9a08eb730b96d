"""An unmodified command-line agent: mini-swe-agent repairs a tiny git repository in a folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from areal_lite import workflow_context

OPTIONS = "-m openai/default -c mini.yaml -c agent.step_limit=20 -y --exit-immediately --agent-class default"
SETTINGS = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}


class MiniSweAgent:
    """Reward 1 if the row's ``test`` passes afterwards.

    A row has ``question`` (the task), ``files`` (text by name) and ``test`` (Python that exits with 0).
    """

    async def run(
        self, data: dict[str, Any], base_url: Any = None, api_key: Any = None, http_client: Any = None
    ) -> float:
        with tempfile.TemporaryDirectory() as folder:
            settings = {**SETTINGS, "MSWEA_GLOBAL_CONFIG_DIR": folder}
            repository = Path(folder) / "repository"
            await asyncio.to_thread(make_repository, repository, data["files"])
            command = ["-m", "minisweagent.run.mini", *OPTIONS.split(), "-t", data["question"]]
            code, printed = await python([*command, "-o", f"{folder}/run.json"], repository, settings)
            if code:
                raise RuntimeError(f"mini-swe-agent exited with {code}: {printed[-2000:]}")
            code, _ = await python(["-c", data["test"]], repository, {})
            return float(code == 0)


def make_repository(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    author = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


async def python(arguments: list[str], folder: Path, settings: dict[str, str]) -> tuple[int, str]:
    """Run Python in ``folder``; return its exit code and what it printed."""
    env = {**os.environ, **workflow_context.get().agent.environment, **settings}
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=folder, env=env, **pipes)
    try:
        printed, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            process.kill()
    return process.returncode or 0, printed.decode(errors="replace")
