"""The embedded server as a child process of a run. Imports no torch."""

from __future__ import annotations

import os
import select
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import IO

from areal_lite.config.server_config import EmbeddedServerConfig, ServerConfig
from areal_lite.errors import ConfigError, ServerError
from areal_lite.processes.child_process import ChildProcess
from areal_lite.servers.programs.server_process import ServerProcess, check_port
from areal_lite.servers.programs.server_program import ServedModel

EMBEDDED_PROGRAM = "areal_lite.embedded"


class EmbeddedProgram(ServerProcess):
    """One child process that serves one model; ``program`` is the module that it runs."""

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        model: ServedModel,
        *,
        gpus: str | None = None,
        log_path: Path | None,
        program: str = EMBEDDED_PROGRAM,
    ) -> None:
        super().__init__(name, config, port=config.port, log_path=log_path)
        check_port(config.host, config.port)
        self.model = model
        self._gpus = gpus
        self._program = program
        self._ready = -1

    def _launch(self, output: IO[bytes]) -> ChildProcess:
        self._ready, report = os.pipe()
        command = [*self._command(), f"--ready-fd={report}"]
        try:
            return ChildProcess(command, environment=self._environment(), output=output, pass_fds=(report,))
        finally:
            os.close(report)

    def _answers(self, deadline: float) -> bool:
        """Read the port that the child reports once it listens; if it ends, the pipe closes without one."""
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        with os.fdopen(self._ready) as pipe:
            line = pipe.readline() if poll.poll(1000 * max(0.0, deadline - time.monotonic())) else ""
        if not line:
            self.wait(max(0.0, deadline - time.monotonic()))
            return False
        self._port = int(line)
        return True

    def _start_error(self, code: int) -> ServerError | ConfigError:
        if code == ConfigError.exit_code:
            tail = self.log_tail()
            return ConfigError(tail[tail.rfind("error: ") + len("error: ") :])
        return super()._start_error(code)

    def _command(self) -> list[str]:
        values = {field.name: getattr(self.config, field.name) for field in fields(EmbeddedServerConfig)}
        values |= {"port": self._port, "seed": self.model.seed, "weight_version": self.model.weight_version}
        return [
            *(sys.executable, "-m", self._program, self.model.model_path),
            *(["--deterministic"] if self.model.deterministic else []),
            *(f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None),
        ]

    def _environment(self) -> dict[str, str]:
        threads = str(cpu_threads(self.config))
        package_root = str(Path(__file__).resolve().parents[3])
        variables = os.environ | self.config.env
        if self._gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self._gpus
        return variables | {
            # With spinning threads, two processes on the same cores generated 15 times slower; GOMP_SPINCOUNT in the
            # environment of a run whose processes take turns lets them spin a little.
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "0",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, [package_root, variables.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
        }


def cpu_threads(config: EmbeddedServerConfig) -> int:
    """Return the CPU threads of the model: those of ``config``, or half of the cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return config.num_threads or max(1, cores // 2)
