"""How an episode's agent reaches its model: ``workflow_context.get().agent``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_lite.agents.isolation.agent_program import ProcessLimits, run_program, working_folder
from areal_lite.api.trajectory import ProcessRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAccess:
    """How one episode's agent reaches its session; valid until ``run()`` returns."""

    base_url: str
    """Address of OpenAI's APIs, ``http://127.0.0.1:PORT/v1``."""
    anthropic_base_url: str
    """Address of Anthropic's API, ``http://127.0.0.1:PORT``."""
    api_key: str
    http_client: Any
    """An ``httpx.AsyncClient`` that needs no sockets; SDKs take it as ``http_client``."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that SDKs read; give them to a subprocess."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    async def run_process(
        self,
        command: Sequence[str],
        *,
        cwd: str | None = None,
        inherit: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        limits: ProcessLimits | None = None,
        timeout_s: float | None = None,
    ) -> ProcessRecord:
        """Run an agent in another program; its SDK finds this episode's model in the environment.

        The program sees PATH, LANG, HOME (its working directory), :attr:`environment` and what ``inherit`` and
        ``variables`` add, no other variable. Its process group is killed when it ends, at the timeout, and when
        the episode is stopped. What it printed is kept in the episode's trajectory.

        Args:
            command: Program and arguments; no shell.
            cwd: Its working directory; None makes an empty one and removes it afterwards.
            inherit: Names of variables it takes from this process.
            variables: Values of further variables.
            limits: What it may use; None is ``ProcessLimits()``.
            timeout_s: Seconds after which it is killed; None leaves it to the episode's deadline.

        Returns:
            Exit status and the last 64 KiB of each output.

        Raises:
            FileNotFoundError: If there is no such program or folder.
        """
        with working_folder(cwd) as folder:
            environment = {
                "PATH": os.environ.get("PATH", os.defpath),
                "LANG": os.environ.get("LANG", "C.UTF-8"),
                **{name: os.environ[name] for name in inherit if name in os.environ},
                **{"HOME": folder, **self.environment, **(variables or {})},
            }
            return await run_program(command, folder, environment, limits or ProcessLimits(), timeout_s)
