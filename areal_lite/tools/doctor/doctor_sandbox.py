"""The check of ``areal-lite doctor`` that a sandbox holds: programs in it try to escape, and none may."""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.errors import ConfigError
from areal_lite.processes.sandbox import ProcessLimits, check_sandbox
from areal_lite.tools.doctor.doctor_machine import Findings, ok

LIMITS = ProcessLimits(memory_bytes=2**28, processes=64)
_WRITE = "write outside its folder"
ATTEMPTS: dict[str, str] = tomllib.loads(resources.files(__package__).joinpath("escapes.toml").read_text())
"""Programs that try to escape, by what they try."""
_PROGRAM = (
    "import json, os, sys, time; facts = json.loads(sys.argv[1]); print('tried', flush=True)\nCODE\nprint('escaped')"
)


def sandbox_findings(sandbox: str) -> Findings:
    """Try to escape from the sandbox of a run; raises ConfigError with what is possible."""
    if sandbox == "none":
        return
    check_sandbox(sandbox)
    if found := asyncio.run(escapes(sandbox, LIMITS)):
        raise ConfigError(
            f"rollout.agents.sandbox is {sandbox}, and a program in it can {', '.join(found)}: use another sandbox, or "
            "programs that you trust"
        )
    yield ok(f"sandbox {sandbox}: no program in it can {', '.join(ATTEMPTS)}")


async def escapes(sandbox: str, limits: ProcessLimits) -> list[str]:
    """Return the names of the attempts that succeed; raises ConfigError if one cannot be made."""
    access = AgentAccess(base_url="", anthropic_base_url="", api_key="", http_client=None, sandbox=sandbox)
    python = "python3" if sandbox.startswith("docker") else sys.executable
    secret, name = secrets.token_hex(), f"areal-lite-escape-{os.getpid()}"
    folders = (Path("/tmp"), Path.cwd(), Path.home(), Path("/"), Path("/usr"))  # nosec B108 # tried, and must fail
    paths = [folder / name for folder in folders]
    bystander = subprocess.Popen(["sleep", "1000"], env={**os.environ, "AREAL_LITE_ESCAPE": secret})  # noqa: ASYNC220
    found = []
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            facts = {"port": listener.getsockname()[1], "paths": list(map(str, paths)), "secret": secret}
            for attempt, code in ATTEMPTS.items():
                command = [python, "-c", _PROGRAM.replace("CODE", code), json.dumps(facts)]
                done = await access.run_process(command, limits=limits, timeout_s=60)
                if not done.stdout.startswith("tried"):
                    raise ConfigError(f"sandbox {sandbox}: cannot try to {attempt}: {done.stderr.strip() or done}")
                if "escaped" in done.stdout or (attempt == _WRITE and any(path.exists() for path in paths)):
                    found.append(attempt)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
        bystander.kill()
        bystander.wait()
    return found
