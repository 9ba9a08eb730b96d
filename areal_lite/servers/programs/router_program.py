"""sglang-router as a child process, in front of the SGLang servers that a run starts."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import IO

from areal_lite.config.server_config import ServerConfig
from areal_lite.errors import ConfigError
from areal_lite.processes.child_process import ChildProcess
from areal_lite.processes.server_process import ServerProcess
from areal_lite.servers.programs.ports import free_ports
from areal_lite.servers.programs.server_program import interpreter

_MODULE = "sglang_router"
_POLL_S = 0.2
_NO_TIMEOUT_S = 10**6
"""The engine has its own timeouts; one here would end long answers."""


class RouterProgram(ServerProcess):
    """An sglang-router without servers; the engine gives it those that serve the newest weights.

    It keeps an episode on one server, a new episode on that with the fewest, and tries nothing again itself.
    """

    def __init__(self, config: ServerConfig, *, log_path: Path) -> None:
        super().__init__(
            "the sglang-router",
            model_path="",
            weight_version="",
            log_path=log_path,
            start_timeout_s=config.start_timeout_s,
        )
        self._config = config
        self._port, self._metrics_port = free_ports(config.host, 2)

    def _launch(self, output: IO[bytes]) -> ChildProcess:
        host = self._config.host
        command = [interpreter(self._config), "-m", f"{_MODULE}.launch_router", f"--host={host}"]
        command += [f"--port={self._port}", f"--prometheus-host={host}", f"--prometheus-port={self._metrics_port}"]
        command += ["--policy=manual", "--assignment-mode=min_load", "--disable-retries", "--disable-circuit-breaker"]
        command += [f"--request-timeout-secs={_NO_TIMEOUT_S}", "--shutdown-grace-period-secs=1", "--log-level=warn"]
        return ChildProcess(command, environment=os.environ | self._config.env, output=output)

    def _wait_for_answer(self, deadline: float) -> str | None:
        address = f"http://{self._config.host}:{self._port}"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while (left_s := deadline - time.monotonic()) > 0 and self.wait(min(left_s, _POLL_S)) is None:
            try:
                with direct.open(f"{address}/workers", timeout=max(1.0, left_s)):
                    return address
            except OSError:
                continue
        return None


def check_router_program(config: ServerConfig) -> None:
    """Check before anything starts that sglang-router is installed, if ``server.router`` is set; raises ConfigError."""
    if not config.router:
        return
    python = interpreter(config)
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({_MODULE!r}) is None)"
    if subprocess.run([python, "-c", look], env=os.environ | config.env, timeout=60).returncode:
        raise ConfigError(
            f"server.router is true, and sglang-router is not installed for {python}: run `{python} -m pip install "
            "sglang-router`"
        )
