"""SGLang, vLLM and sglang-router as child processes: command lines, environment, and when they are ready."""

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.server_config import ServerConfig, flag_of, tensor_parallel_size
from areal_lite.config.trainer_config import AdapterShape
from areal_lite.errors import ConfigError
from areal_lite.processes.place import HERE, Place
from areal_lite.processes.ports import check_port, free_ports
from areal_lite.servers.dialects import dialect_of
from areal_lite.servers.dialects.dialect import BadResponse, ErrorReply, GenerationCall
from areal_lite.servers.programs.server_process import ServerProcess

Backend = Literal["sglang", "vllm"]

_MODULES = {"sglang": "sglang.launch_server", "vllm": "vllm.entrypoints.openai.api_server"}
_EXTENSION = Path(__file__).with_name("vllm_extension")
_OF_TORCHRUN = re.compile(r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*)")
"""Variables of the trainers, which a server would take for its own."""
_PROBE_TOKENS = 4
_PROBE_SECONDS = 0.2
_ROUTER = "sglang_router"
_NO_TIMEOUT_S = 10**6
"""The engine has its own timeouts; one of the router would end long answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model, and how servers sample from it; the same for all servers of a run."""

    model_path: str
    seed: int = 0
    deterministic: bool = False
    """The bits of an answer depend on its request and the weights only: the embedded server runs requests one by one.
    In float32 on a CPU the bits equal the trainer's."""
    weight_version: str = "0"
    adapters: AdapterShape | None = None
    """Shape of the adapters that SGLang and vLLM must be able to load; the embedded server loads any."""


class ServerProgram(ServerProcess):
    """A server of SGLang or vLLM. It is ready once it answers a generation with log-probs."""

    def __init__(
        self, name: str, config: ServerConfig, model: ServedModel, *, log_path: Path, place: Place = HERE
    ) -> None:
        super().__init__(name, config, port=config.port, log_path=log_path, place=place)
        assert config.backend in ("sglang", "vllm")
        self._backend: Backend = config.backend
        self._model = model

    def _command(self) -> list[str]:
        flags = _flags(self._backend, self.config, self._model, self._port)
        if self._model.adapters is not None:
            flags |= dialect_of(self._backend).adapter_flags(self._model.adapters)
            if self._backend == "sglang" and self.config.device == "cpu":
                flags["lora-backend"] = "torch_native"  # the others are kernels for GPUs
        given = {flag_of(name): value for name, value in self.config.args.items()}
        return [
            interpreter(self.config),
            *("-m", _MODULES[self._backend]),
            *(word for name, value in (flags | given).items() for word in _words(name, value, self._backend)),
        ]

    def _environment(self) -> dict[str, str]:
        variables = {
            name: value for name, value in os.environ.items() if not _OF_TORCHRUN.fullmatch(name)
        } | self.config.env
        if self._model.adapters is not None:
            variables |= dialect_of(self._backend).adapter_variables
        variables.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)  # log-probs without temperature
        variables["PYTHONUNBUFFERED"] = "1"
        if self.config.num_threads:
            variables["OMP_NUM_THREADS"] = str(self.config.num_threads)
        if self._backend == "sglang":
            variables.setdefault("SGLANG_VLM_CACHE_SIZE_MB", "0")  # a tower's features, which it keeps over updates
        if self._backend == "vllm":
            variables["VLLM_SERVER_DEV_MODE"] = "1"  # routes of the control plane
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_EXTENSION), variables.get("PYTHONPATH")]))
        return variables

    def _answers(self, deadline: float) -> bool:
        return asked_until(self, deadline, self._generates)

    def _generates(self, timeout_s: float) -> bool:
        dialect = dialect_of(self._backend)
        gconfig = GenerationHyperparameters(greedy=True, ignore_eos=True)
        rid = uuid.uuid4().hex
        call = GenerationCall(input_ids=[1, 2, 3], gconfig=gconfig, rid=rid, max_new_tokens=_PROBE_TOKENS)
        chunk = dialect.parse(ask(self._url + dialect.generate_path, dialect.generate_body(call), timeout_s))
        if self._backend == "vllm":  # it has no flag for it
            ask(f"{self._url}/update_weight_version", {"new_version": self._model.weight_version}, timeout_s)
        return chunk is not None and len(chunk.tokens) == _PROBE_TOKENS


class RouterProgram(ServerProcess):
    """An sglang-router without servers; the engine gives it those that serve the newest weights. It keeps an episode on
    one server, a new episode on that with the fewest, and tries nothing again itself."""

    def __init__(self, config: ServerConfig, *, log_path: Path) -> None:
        port, self._metrics_port = free_ports(config.host, 2)
        super().__init__("the sglang-router", config, port=port, log_path=log_path)

    def _command(self) -> list[str]:
        host = self.config.host
        return [
            *(interpreter(self.config), "-m", f"{_ROUTER}.launch_router", f"--host={host}", f"--port={self._port}"),
            *(f"--prometheus-host={host}", f"--prometheus-port={self._metrics_port}", "--log-level=warn"),
            *("--policy=manual", "--assignment-mode=min_load", "--disable-retries", "--disable-circuit-breaker"),
            *(f"--request-timeout-secs={_NO_TIMEOUT_S}", "--shutdown-grace-period-secs=1"),
        ]

    def _answers(self, deadline: float) -> bool:
        return asked_until(self, deadline, lambda timeout_s: bool(ask(f"{self._url}/workers", None, timeout_s)))


def check_programs(config: ServerConfig) -> None:
    """Check before anything starts that SGLang, vLLM or the router are installed and ports free; raises ConfigError."""
    if config.backend in ("sglang", "vllm"):
        for port in server_ports(config):
            check_port(config.host, port)
        _check_installed(config, config.backend, f"server.backend is {config.backend}, which")
    if config.router:
        _check_installed(config, _ROUTER, "server.router is true, and sglang-router")


def _check_installed(config: ServerConfig, module: str, why: str) -> None:
    python, package = interpreter(config), module.replace("_", "-")
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        missing = subprocess.run([python, "-c", look], env=os.environ | config.env, timeout=60).returncode
    except OSError as error:
        raise ConfigError(
            f"server.python is {python!r}, which cannot be run ({error.strerror}): give the interpreter of an "
            f"environment with {package}, such as venv/bin/python"
        ) from None
    if missing:
        raise ConfigError(
            f"{why} is not installed for {python}: run `{python} -m pip install {package}`, or set "
            "server.python to the interpreter of an environment that has it"
        )


def gpu_groups(config: ServerConfig) -> list[str] | list[None]:
    """Return CUDA_VISIBLE_DEVICES of each replica: groups of its tensor parallel size, the last GPUs of the machine.
    None for each on a machine without GPUs."""
    gpus = [] if config.device == "cpu" else visible_gpus()
    if not gpus:
        return [None] * config.replicas
    size = tensor_parallel_size(config)
    needed = size * config.replicas
    if needed > len(gpus):
        raise ConfigError(
            f"server.replicas is {config.replicas} with {size} GPUs each, and this machine shows {len(gpus)}: use fewer"
        )
    last = gpus[len(gpus) - needed :]
    return [",".join(last[start : start + size]) for start in range(0, needed, size)]


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def interpreter(config: ServerConfig) -> str:
    return config.python or sys.executable


def server_ports(config: ServerConfig) -> list[int]:
    """Return the port of each replica: from ``server.port`` on, or free ones; raises ConfigError."""
    if config.port:
        return list(range(config.port, config.port + config.replicas))
    return free_ports(config.host, config.replicas)


def _flags(backend: Backend, config: ServerConfig, model: ServedModel, port: int) -> dict[str, Any]:
    shared = {"host": config.host, "port": port, "dtype": config.dtype}
    if backend == "sglang":
        return shared | {
            "model-path": model.model_path,
            "context-length": config.context_length,
            "random-seed": model.seed,
            "device": None if config.device == "auto" else config.device,
            "weight-version": model.weight_version,
            "incremental-streaming-output": True,
            "constrained-json-disable-any-whitespace": True,  # a small model fills its budget with white space
        }
    return shared | {
        "model": model.model_path,
        "max-model-len": config.context_length,
        "seed": model.seed,
        "enable-scale-out": True,
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": "areal_lite_vllm.WorkerExtension",
        "structured-outputs-config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }


def _words(name: str, value: Any, backend: Backend) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"] if backend == "vllm" else []  # flags of SGLang are off by default
    if value is None:
        return []
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    return [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]


def asked_until(server: ServerProcess, deadline: float, ask: Callable[[float], bool]) -> bool:
    """Ask, with the seconds left, until it answers; what a request may raise is the answer of one that does not yet."""
    while (left_s := deadline - time.monotonic()) > 0 and server.wait(min(left_s, _PROBE_SECONDS)) is None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, BadResponse, ErrorReply):
            if ask(max(1.0, left_s)):
                return True
    return False


def ask(url: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as reply:
        content = reply.read()
    return json.loads(content) if content else None
