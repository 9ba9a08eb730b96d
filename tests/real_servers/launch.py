"""Settings with which a run starts a real server on this machine's CPU."""

from __future__ import annotations
import json
import os
from pathlib import Path
from typing import Any
import pytest
from areal_lite.config.server_config import ServerConfig
from areal_lite.config.trainer_config import AdapterShape
from areal_lite.servers.programs.server_group import check_servers, make_servers
from areal_lite.servers.programs.server_process import ServerProcess
from areal_lite.servers.programs.server_program import ServedModel

HERE = Path(__file__).parent
WINDOW = 2048
SETTINGS: dict[str, dict[str, Any]] = {
    "sglang": {
        "device": "cpu",
        "env": {
            "PYTHONPATH": str(HERE / "without_cuda"),
            "SGLANG_USE_CPU_ENGINE": "1",
        },
        "args": {
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
            "max_total_tokens": 65536,
            "max_running_requests": 64,
            "sleep_on_idle": True,
            "skip_server_warmup": True,
        },
    },
    "vllm": {
        "env": {
            "PYTHONPATH": str(HERE / "without_cuda"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        "args": {"enforce_eager": True, "max_num_seqs": 64},
    },
}


def server_settings(backend: str, model: Path) -> dict[str, Any]:
    """Return the keys of ``server:`` for a float32 server; skip the test if the environment names none."""
    if backend == "embedded":
        return {"backend": backend, "dtype": "float32", "num_threads": 1}
    name = f"AREAL_LITE_{backend.upper()}_PYTHON"
    python = os.environ.get(name)
    if python is None:
        pytest.skip(f"needs {backend}: run `make test-servers`, or set {name} to the Python of its environment")
    config = json.loads((model / "config.json").read_text())
    longest = config.get("text_config", config)["max_position_embeddings"]
    settings = SETTINGS[backend]
    return {
        **settings,
        "env": {**settings["env"], "HF_HUB_OFFLINE": "1"},
        "backend": backend,
        "python": str(Path(python).absolute()),
        "dtype": "float32",
        "context_length": min(WINDOW, longest),
        "num_threads": 1,
    }


def real_process(backend: str, model: Path, folder: Path, *, adapters: AdapterShape | None = None) -> ServerProcess:
    """Return a server that logs into ``folder``, not yet started; it keeps its address when it starts again."""
    config = ServerConfig(**server_settings(backend, model))
    check_servers(config)
    (server,) = make_servers(config, ServedModel(model_path=str(model), adapters=adapters), folder)
    return server
