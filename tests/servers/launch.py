"""Starts real servers on this machine's CPU, each from a virtual environment of its own, and stops them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

HERE = Path(__file__).parent
WINDOW = 2048
START_TIMEOUT_S = 400.0
_FLAGS = {
    "sglang": (
        "-m sglang.launch_server --model-path {model} --device cpu --attention-backend torch_native "
        "--disable-overlap-schedule --context-length {window} --max-total-tokens 65536 --max-running-requests 64 "
        "--sleep-on-idle --skip-server-warmup --constrained-json-disable-any-whitespace"
    ),
    "vllm": (
        "-m vllm.entrypoints.openai.api_server --model {model} --max-model-len {window} --max-num-seqs 64 "
        "--enforce-eager --enable-scale-out --logprobs-mode processed_logprobs "
        "--worker-extension-cls areal_lite_vllm.WorkerExtension "
        "--structured-outputs-config.backend xgrammar --structured-outputs-config.disable_any_whitespace true"
    ),
}
_VARIABLES = {
    "sglang": {"PYTHONPATH": str(HERE / "sglang_cpu"), "SGLANG_USE_CPU_ENGINE": "1"},
    "vllm": {
        "PYTHONPATH": str(HERE.parents[1] / "areal_lite/launch/vllm_extension"),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
}


class ServerProcess:
    """A server in float32 on a free port of 127.0.0.1, with all the processes it starts.

    Args:
        backend: sglang or vllm.
        python: The Python of its virtual environment.
        model: Folder of the model.
        log: File for its output.
        port: 0 takes a free one.
    """

    def __init__(self, backend: str, python: Path, model: Path, log: Path, *, port: int = 0) -> None:
        self.port = port or _free_port()
        self.log = log
        flags = _FLAGS[backend].format(model=model, window=_window(model)).split()
        command = [str(python), *flags, "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **_VARIABLES[backend]}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait_until_ready(self) -> None:
        """Return once the server lists its model.

        Raises:
            RuntimeError: If it ends first, or takes too long.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://{self.address}/v1/models", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start; the end of {self.log}:\n{self.log.read_text()[-3000:]}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the server and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        try:
            self.wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self.kill()
        self._process.wait()


def _window(model: Path) -> int:
    return min(WINDOW, json.loads((model / "config.json").read_text())["max_position_embeddings"])


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
