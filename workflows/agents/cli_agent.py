"""Coding agents as they come from npm: Claude Code, Codex and Gemini CLI, each through the API that it speaks.

``npm install @anthropic-ai/claude-code @openai/codex @google/gemini-cli`` puts them into ``node_modules/.bin``. Their
prompts have 10,000 to 20,000 tokens: raise ``rollout.gconfig.max_tokens``, and serve a model with room for them.
"""

from __future__ import annotations
import json
import tempfile
from pathlib import Path
from typing import Any
from areal_lite import workflow_context
from areal_lite.agents.isolation.agent_access import ProcessLimits

QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "GEMINI_TELEMETRY_ENABLED": "0"}
LIMITS = ProcessLimits(memory_bytes=None)  # Node.js reserves far more than it uses


def choose_key(folder: Path) -> None:
    """Have Gemini CLI take its key from the environment; it would ask."""
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}}))


class CliAgent:
    """Reward 1 if the right result is in what the program prints.

    Args:
        program: ``claude``, ``codex`` or ``gemini``, or a path that ends so.
    """

    def __init__(self, program: str) -> None:
        self.program = program

    async def run(self, data: dict[str, Any], *, base_url: str, **_: Any) -> float:
        access = workflow_context.get().agent
        with tempfile.TemporaryDirectory() as home:
            choose_key(Path(home, ".gemini"))
            command = [self.program, *self.options(base_url), data["question"]]
            done = await access.run_process(command, cwd=home, variables=QUIET, limits=LIMITS, timeout_s=300)
        return float(data["answer"] in done.stdout)

    def options(self, base_url: str) -> list[str]:
        """Return what asks one question and prints the answer, of the model that ``base_url`` serves."""
        match Path(self.program).name:
            case "claude":
                return ["--model", "default", "--print"]
            case "gemini":
                return ["--model", "default", "--skip-trust", "--prompt"]
            case _:
                provider = f'{{name="run", base_url="{base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
                settings = {"model_providers.run": provider, "model_provider": "run", "web_search": "disabled"}
                options = [f"--config={name}={value}" for name, value in settings.items()]
                return ["exec", "--skip-git-repo-check", "--model", "default", *options]
