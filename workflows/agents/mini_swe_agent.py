"""An unmodified command-line agent: mini-swe-agent repairs a tiny git repository in a folder of its own."""

from __future__ import annotations
import asyncio
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
        run_process = workflow_context.get().agent.run_process
        with tempfile.TemporaryDirectory() as folder:
            repository = Path(folder) / "repository"
            await asyncio.to_thread(make_repository, repository, data["files"])
            settings = {**SETTINGS, "MSWEA_GLOBAL_CONFIG_DIR": folder}
            command = [
                sys.executable,
                "-m",
                "minisweagent.run.mini",
                *OPTIONS.split(),
                "-t",
                data["question"],
            ]
            output = ["-o", f"{folder}/run.json"]
            process = await run_process([*command, *output], cwd=str(repository), variables=settings)
            if process.returncode:
                raise RuntimeError(f"mini-swe-agent exited with {process.returncode}: {process.stderr}")
            test = [sys.executable, "-c", data["test"]]
            return float((await run_process(test, cwd=str(repository), timeout_s=60)).returncode == 0)


def make_repository(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    author = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
