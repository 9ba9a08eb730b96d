"""The embedded server as a child process of a run or of own scripts, with settings one by one. Imports no torch."""

import os
import select
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, TypeVar
from pydantic import ValidationError
from areal_lite.config.schema import meaning_of
from areal_lite.config.server_config import EmbeddedServerConfig, ServerConfig
from areal_lite.errors import ConfigError, ServerError
from areal_lite.files.model_path import check_image_model, check_model_path
from areal_lite.processes.child_process import ChildProcess
from areal_lite.processes.place import HERE, Place, Program
from areal_lite.processes.ports import check_port
from areal_lite.servers.programs.server_process import ServerProcess
from areal_lite.servers.programs.server_program import ServedModel, ask, asked_until

EMBEDDED_PROGRAM = "areal_lite.embedded"


class EmbeddedProgram(ServerProcess):
    """One child process that serves one model; ``program`` is the module that it runs."""

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        model: ServedModel,
        *,
        log_path: Path | None,
        program: str = EMBEDDED_PROGRAM,
        place: Place = HERE,
    ) -> None:
        super().__init__(name, config, port=config.port, log_path=log_path, place=place)
        if place is HERE:
            check_port(config.host, config.port)
        self.model = model
        self._program = program
        self._ready = -1

    def _launch(self, output: IO[bytes]) -> Program:
        if self.place is not HERE:
            return super()._launch(output)
        self._ready, report = os.pipe()
        command = [*self._command(), f"--ready-fd={report}"]
        try:
            return ChildProcess(command, environment=self._environment(), output=output, pass_fds=(report,))
        finally:
            os.close(report)

    def _answers(self, deadline: float) -> bool:
        """Read the port that the child reports once it listens; if it ends, the pipe closes without one. No pipe leads
        to another node, so ask a server there."""
        if self.place is not HERE:
            return asked_until(self, deadline, lambda timeout_s: bool(ask(f"{self._url}/model_info", None, timeout_s)))
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
    return config.num_threads or max(1, len(os.sched_getaffinity(0)) // 2)


C = TypeVar("C", bound=EmbeddedServerConfig)


class EmbeddedServer(EmbeddedProgram):
    """One child process that serves one model.

    Example:
        with EmbeddedServer(model_path="models/smollm2", dtype="float32") as server:
            requests.post(f"{server.address}/generate", json=...)
    """

    def __init__(
        self,
        *,
        model_path: str,
        seed: int = 0,
        weight_version: str = "0",
        deterministic: bool = False,
        log_path: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Check the settings; ``start`` runs the server.

        Args:
            model_path: Directory with config.json, tokenizer and safetensors weights; or a name on the Hugging Face
                Hub.
            seed: Seed for requests without one; their outputs then depend on the order of arrival.
            weight_version: Name of the first weights.
            deterministic: Make the bits of each answer depend on its request, the weights and ``num_threads`` only.
                Requests run one by one and share no KV cache: several times slower with many at once.
            log_path: File to append the child's stdout and stderr to. None: a temporary file, for error messages.
            settings: Fields of ``EmbeddedServerConfig``.

        Raises:
            ConfigError: If a setting is unknown or out of range, or model or port cannot be used.
        """
        config = ServerConfig(**asdict(checked_settings(EmbeddedServerConfig, settings)))
        model = ServedModel(
            model_path=model_path, seed=seed, weight_version=weight_version, deterministic=deterministic
        )
        super().__init__("the embedded server", config, model, log_path=None if log_path is None else Path(log_path))
        check_model_path(model_path)  # a run checks its model before it makes servers of it
        check_image_model(model_path)


def checked_settings(kind: type[C], settings: dict[str, Any]) -> C:
    """Build the config class ``kind`` from field names and values; raises ConfigError with every fault."""
    try:
        return kind(**settings)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    known = ", ".join(kind.__dataclass_fields__)
    lines = []
    for fault in faults:
        name = str(fault["loc"][0])
        if fault["type"] == "unexpected_keyword_argument":
            lines.append(f"the embedded server has no setting {name!r}; it has {known}.")
        else:
            rule = fault["msg"].replace("Input should", "it must")
            lines.append(f"{name} is {fault['input']!r}: {rule}. {meaning_of(kind, name)}")
    raise ConfigError("\n".join(lines))
