"""The ``server:`` section: the servers that a run starts, and what must hold before their program is started."""

from dataclasses import field
from typing import Annotated, Any, Literal
from pydantic import Field
from pydantic.dataclasses import dataclass
from areal_lite.config.schema import STRICT, Above0, Positive
from areal_lite.errors import ConfigError

_EMBEDDED_ONLY = ("max_running_requests", "max_total_tokens", "max_prefill_tokens")
_KEYS_OF_FLAGS = {
    **dict.fromkeys(("model", "model-path", "tokenizer", "tokenizer-path"), "model_path"),
    **dict.fromkeys(("seed", "random-seed"), "seed"),
    **dict.fromkeys(("context-length", "max-model-len"), "server.context_length"),
    **{name: f"server.{name}" for name in ("host", "port", "dtype", "device")},
}
"""The config key of a flag that server.args may not set."""
_NEEDED_FLAGS = {
    "sglang": {"weight-version", "incremental-streaming-output", "api-key", "admin-api-key"},
    "vllm": {"enable-scale-out", "logprobs-mode", "worker-extension-cls", "api-key"},
}
"""Flags whose value the engine needs: token ids in and out, log-probs, versions, weight updates, no key."""
_OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "VLLM_SERVER_DEV_MODE", "SGLANG_RETURN_ORIGINAL_LOGPROB")
_TENSOR_PARALLEL = ("tp", "tp-size", "tensor-parallel-size")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EmbeddedServerConfig:
    """Settings of one embedded server."""

    host: str = "127.0.0.1"
    """Address to listen on. There is no authentication: beyond loopback, others can generate and change weights."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on, further replicas on the ports after it; 0 takes free ones."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the served weights. auto is that of the trainer. If nothing trains and trainer.dtype is auto
    too, SGLang and vLLM take that of config.json, the embedded server bfloat16, or float32 on a CPU that lacks it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a GPU if there is one."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the model; 0 takes half of the cores, or all if server and trainer take turns (on-policy)."""
    max_running_requests: Positive = 64
    """Requests decoded together; more wait in a queue."""
    max_total_tokens: Positive | None = None
    """Limit on prompt plus max_new_tokens, summed over running requests; null is what the KV cache holds."""
    max_prefill_tokens: Positive | None = None
    """Prompt tokens, with padding, of one step; running requests wait for it. null is 512 on a CPU, 8192 on a GPU."""
    context_length: Annotated[int, Field(ge=16)] | None = None
    """Maximum tokens of prompt and answer together; null is the model's own limit."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServerConfig(EmbeddedServerConfig):
    """The servers that a run or ``areal-lite serve`` starts."""

    backend: Literal["sglang", "vllm", "embedded"] | None = None
    """Program to start; rollout.backend follows it. Null: embedded, or nothing if rollout.addresses names servers."""
    replicas: Positive = 1
    """Number of servers. On a machine with NVIDIA GPUs each gets as many as its tensor parallel size; together they get
    the last GPUs, because trainers use the first."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further options of SGLang or vLLM, by the name of the flag: {tp: 2, mem_fraction_static: 0.8}. true is a flag
    without a value; what the engine needs cannot be changed."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the servers."""
    router: bool = False
    """Start an sglang-router in front of SGLang servers, from the same environment; rollout.router follows it."""
    python: str | None = None
    """Interpreter of an environment with SGLang or vLLM, such as venv/bin/python. Null is that of the run."""
    start_timeout_s: Above0 = 600.0
    """Seconds in which a server must answer its first request."""


def check_server(config: ServerConfig) -> None:
    """Check that the program to start has the settings; raises ConfigError."""
    backend = config.backend or "embedded"
    if config.router and backend != "sglang":
        raise ConfigError(
            f"server.router is an sglang-router, and server.backend is {backend}: set server.backend: sglang, or "
            "server.router: false"
        )
    for name in ("args", "python") if backend == "embedded" else ():
        if getattr(config, name):
            raise ConfigError(f"server.{name} is for sglang and vllm, and server.backend is embedded: remove it")
    for name in () if backend == "embedded" else _EMBEDDED_ONLY:
        if getattr(config, name) != getattr(ServerConfig, name):
            raise ConfigError(
                f"server.{name} is a setting of the embedded server, and server.backend is {backend}: put "
                f"{backend}'s own flag into server.args"
            )
    for name in config.args:
        flag = flag_of(name).removeprefix("no-")
        if key := _KEYS_OF_FLAGS.get(flag):
            raise ConfigError(f"server.args sets {name!r}, which comes from {key}: set {key} instead")
        if flag in _NEEDED_FLAGS[backend]:
            raise ConfigError(f"server.args sets {name!r}, whose value the engine needs to be its own: remove it")
    for name in () if backend == "embedded" else _OWN_VARIABLES:
        if name in config.env:
            raise ConfigError(f"server.env sets {name}, which the engine sets itself: remove it")
    tensor_parallel_size(config)


def flag_of(name: str) -> str:
    """Return a name in ``server.args`` as SGLang and vLLM write the flag, without dashes before it."""
    return name.lstrip("-").replace("_", "-")


def gpus_on_node(config: ServerConfig, n_gpus_per_node: int) -> int:
    """Return the GPUs that a replica reserves on a node with so many; raises ConfigError."""
    return tensor_parallel_size(config) if n_gpus_per_node and config.device != "cpu" else 0


def tensor_parallel_size(config: ServerConfig) -> int:
    """Return the GPUs of each replica that ``args`` gives; raises ConfigError."""
    size = next((value for name, value in config.args.items() if flag_of(name) in _TENSOR_PARALLEL), 1)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"server.args gives the tensor parallel size {size!r}: use a whole number from 1")
    return size
