"""The embedded server as a child process. Imports no torch.

Guarantees: the child is in its own process group, so a Ctrl-C at the terminal reaches only the parent; it ends
with its parent, even if SIGKILL ends the parent (through a pipe: a parent-death signal would fire when the *thread*
that started the child ends); ``start`` returns once the child answers requests, without polling.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import areal_lite
from areal_lite.embedded.settings import check_model_path, check_port, cpu_threads, server_config
from areal_lite.errors import ConfigError, ServerError

_LOG_TAIL_LINES = 20


class EmbeddedServer:
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
        start_timeout_s: float = 600.0,
        **settings: Any,
    ) -> None:
        """Check the settings; ``start`` runs the server.

        Args:
            model_path: Directory with config.json, tokenizer and safetensors weights; or a name on the Hugging Face
                Hub.
            seed: Seed for requests without one; their outputs then depend on the order of arrival.
            deterministic: Make the bits of each answer depend on its request, the weights and ``num_threads`` only.
                Requests run one by one and share no KV cache: several times slower with many at once.
            log_path: File to append the child's stdout and stderr to. None: a temporary file, for error messages.
            settings: Fields of ``EmbeddedServerConfig``.

        Raises:
            ConfigError: If a setting is unknown or out of range, or model or port cannot be used.
        """
        self.config = server_config(**settings)
        self.model_path = model_path
        self.seed = seed
        self.weight_version = weight_version
        self.deterministic = deterministic
        check_model_path(model_path)
        check_port(self.config.host, self.config.port)
        self.log_path = None if log_path is None else Path(log_path)
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._address: str | None = None

    @property
    def address(self) -> str:
        """``http://HOST:PORT`` of the running server."""
        if self._address is None:
            raise ServerError("the embedded server is not running; call start(), or use a with statement.")
        return self._address

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before ``start``."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code of the child; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the child's exit code, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> EmbeddedServer:
        """Start the child and wait until it answers requests.

        Raises:
            ConfigError: If the child cannot use a setting.
            ServerError: If the child dies or is not ready in time; with the end of its log.
        """
        if self._process is not None:
            raise ServerError(f"the embedded server is already started (pid {self.pid}); create another one.")
        self._log = tempfile.TemporaryFile() if self.log_path is None else self.log_path.open("a+b")  # noqa: SIM115
        self._log.seek(0, os.SEEK_END)
        ready_read, ready_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "areal_lite.embedded", *self._arguments(ready_write)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(ready_write,),
                start_new_session=True,
                env=self._environment(),
            )
        finally:
            os.close(ready_write)
        try:
            ready = self._wait_until_ready(ready_read)
            self._address = f"http://{ready['host']}:{ready['port']}"
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(ready_read)
        return self

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """End the child by closing its pipe; kill its process group if it still runs after ``timeout_s``."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.poll() is None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._log is not None:
            self._log.close()
        self._address = None

    def log_tail(self) -> str:
        """Return the last lines of the child's log."""
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        written = os.pread(self._log.fileno(), 65536, max(0, size - 65536))  # does not move the shared offset
        return "\n".join(written.decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:])

    def __enter__(self) -> EmbeddedServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _arguments(self, ready_fd: int) -> list[str]:
        values = asdict(self.config) | {"seed": self.seed, "weight_version": self.weight_version}
        return [
            self.model_path,
            f"--ready-fd={ready_fd}",
            "--die-with-stdin",
            *(["--deterministic"] if self.deterministic else []),
            *(f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None),
        ]

    def _environment(self) -> dict[str, str]:
        """Return the child's environment: waiting threads sleep, and this package can be imported."""
        threads = str(cpu_threads(self.config))
        package_root = str(Path(areal_lite.__file__).resolve().parent.parent)
        return os.environ | {
            # With spinning threads, two processes on the same cores generated 15 times slower.
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "0",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
        }

    def _wait_until_ready(self, ready_fd: int) -> dict[str, Any]:
        """Read the child's ready line; if the child dies, the pipe closes without one."""
        assert self._process is not None
        deadline, line = time.monotonic() + self._start_timeout_s, b""
        while not line.endswith(b"\n"):
            if not select.select([ready_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ServerError(
                    f"the embedded server was not ready after {self._start_timeout_s:.0f} s; the end of its log:\n"
                    f"{self.log_tail()}\nIs the model too large for this machine? If not, raise start_timeout_s."
                )
            piece = os.read(ready_fd, 4096)
            if not piece:
                code, tail = self._process.wait(), self.log_tail()
                if code == ConfigError.exit_code:
                    raise ConfigError(tail[tail.rfind("error: ") + len("error: ") :])
                raise ServerError(f"the embedded server ended with code {code} before it was ready:\n{tail}")
            line += piece
        ready: dict[str, Any] = json.loads(line)
        return ready
