"""The settings of one embedded server, and what can be said about them before torch is imported."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from areal_lite.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """What to serve, where, and how large."""

    model_path: str
    """Directory with config.json, tokenizer and safetensors weights; or the name of a model on the Hugging Face Hub."""

    host: str = "127.0.0.1"
    """Address to listen on. The server has no authentication: keep to loopback unless the network is trusted."""

    port: int = 0
    """Port to listen on; 0 takes a free one."""

    dtype: str = "auto"
    """``float32``, ``bfloat16``, ``float16``, or ``auto`` for what config.json says."""

    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto`` for cuda where there is one."""

    num_threads: int | None = None
    """Threads of the model's arithmetic on a CPU. None: half of the cores this process may use."""

    max_running_requests: int = 64
    """Rows of the batch; further requests wait."""

    max_total_tokens: int | None = None
    """Bound on prompt plus ``max_new_tokens``, summed over running requests. None: as many as the slots hold."""

    max_prefill_tokens: int | None = None
    """Padded prompt tokens computed in one step; running requests wait meanwhile. None: 512 on a CPU, where more
    are not faster, 8192 on a GPU."""

    context_length: int | None = None
    """Longest prompt plus output, in tokens. None: what the model was made for."""

    seed: int = 0
    """Decides the samples of requests that bring no seed, given their order of arrival."""

    weight_version: str = "0"
    """Name of the weights that are loaded first."""

    deterministic: bool = False
    """Make the bits of each answer a function of its request, the weights and ``num_threads``: one request after
    another, and nothing of one is reused for the next. Several times slower with many requests at once."""

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(known)}.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: it must be in [0, 65535]; 0 takes a free one.")
        least = {"num_threads": 1, "max_running_requests": 1, "max_prefill_tokens": 1, "context_length": 16}
        for name, bound in {**least, "max_total_tokens": 1}.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{name} is {value}: it must be at least {bound}.")

    @property
    def threads(self) -> int:
        """Threads of the model's arithmetic."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        return self.num_threads or max(1, cores // 2)


def check_model_path(model_path: str, *, key: str = "model_path", has_tokenizer: bool = True) -> None:
    """Refuse a directory that cannot be loaded; a Hub name passes.

    Args:
        model_path: The directory or name.
        key: The config key it came from, for errors.
        has_tokenizer: Whether a tokenizer must be there, too.

    Raises:
        ConfigError: If the path is no directory and no Hub name either, or lacks config.json, tokenizer or weights.
    """
    path = Path(model_path).expanduser()
    if not path.is_dir():
        looks_local = (
            path.exists() or model_path.startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(model_path)
        )
        if looks_local:
            what = "is a file" if path.is_file() else "does not exist"
            raise ConfigError(
                f"{key} {model_path!r} {what}: it must be a directory with config.json and weights, or the "
                "name of a model on the Hugging Face Hub, like 'HuggingFaceTB/SmolLM2-135M-Instruct'."
            )
        return
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{key} {model_path!r} has no config.json: give the directory that save_pretrained wrote, "
            "not its parent."
        )
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{key} {model_path!r} has no *.safetensors file: save the model with save_pretrained, "
            "which writes them."
        )
    if has_tokenizer and not any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        raise ConfigError(
            f"{key} {model_path!r} has no tokenizer: save it there too, with tokenizer.save_pretrained."
        )


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on.

    Raises:
        ConfigError: If the port is taken or the host is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}): stop what holds the port, choose another, or use "
                "port 0 to take a free one."
            ) from error
