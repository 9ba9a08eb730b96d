"""An inference server as a process of the run, whatever program it is. Imports no torch."""

import os
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import IO, Self
from areal_lite.config.server_config import ServerConfig
from areal_lite.errors import ConfigError, ServerError
from areal_lite.processes.place import HERE, Place, Program, stop

_LOG_TAIL_LINES = 30
_LEAKS = ("nanobind: ", "See https://nanobind", " - leaked", " - ... skipped")  # triton's last lines, after any error


class ServerProcess(ABC):
    """One inference server at ``port``; ``start`` and ``stop`` it, or use a ``with`` statement. It ends with this
    process, and on this machine keeps its address when it is started again after its end."""

    def __init__(
        self, name: str, config: ServerConfig, *, port: int, log_path: Path | None, place: Place = HERE
    ) -> None:
        self.name = name
        self.config = config
        self.log_path = log_path
        self._port = port
        self.place = place
        self._child: Program | None = None
        self._log: IO[bytes] | None = None
        self._log_start = 0
        self._address: str | None = None
        """None until it is ready for the first time."""

    @abstractmethod
    def _command(self) -> list[str]: ...

    def _environment(self) -> dict[str, str]:
        return os.environ | self.config.env

    @abstractmethod
    def _answers(self, deadline: float) -> bool:
        """Return whether the server answers requests; False if it ends, or at the monotonic ``deadline``."""

    def _launch(self, output: IO[bytes]) -> Program:
        return self.place.start(self._command(), self._environment(), output)

    @property
    def _url(self) -> str:
        return f"http://{self.config.host}:{self._port}"

    @property
    def address(self) -> str:
        if self._address is None:
            raise ServerError(f"{self.name} is not running; call start(), or use a with statement.")
        return self._address

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code once the server has ended, negative for a signal; None after ``timeout_s``."""
        return None if self._child is None else self._child.wait(timeout_s)

    def launch(self) -> None:
        """Start the program; :meth:`wait_until_ready` must follow."""
        if self._child is not None and self.wait(0) is None:
            raise ServerError(f"{self.name} is already started (pid {self.pid}); create another one.")
        if self._log is None or self._log.closed:
            if self.log_path is None:
                self._log = tempfile.TemporaryFile()  # noqa: SIM115
            else:
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
                self._log = self.log_path.open("a+b")
        self._log_start = self._log.seek(0, os.SEEK_END)
        host, self._port = self.place.listen_at(self.config.host, self._port)
        self.config = replace(self.config, host=host)
        self._child = self._launch(self._log)

    def wait_until_ready(self) -> None:
        """Return once the server answers requests; raises ConfigError or ServerError."""
        try:
            answers = self._answers(time.monotonic() + self.config.start_timeout_s)
            if not answers and (code := self.wait(0)) is not None:
                raise self._start_error(code)
            if not answers:
                raise ServerError(
                    f"{self.name} was not ready after {self.config.start_timeout_s:.0f} s. Is the model too large for "
                    f"this machine? If not, raise start_timeout_s. {self.log_tail()}"
                )
        except BaseException:
            self.stop()
            raise
        self._address = self._url

    def _start_error(self, code: int) -> ServerError | ConfigError:
        return ServerError(f"{self.name} {cause_of_death(code)} before it was ready. {self.log_tail()}")

    def start(self) -> Self:
        self.launch()
        self.wait_until_ready()
        return self

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Ask the server to end; kill it if it still runs after ``timeout_s``."""
        self._address = None
        self.end(timeout_s)
        if self._log is not None:
            self._log.close()

    def end(self, timeout_s: float) -> None:
        """Do :meth:`stop`'s work while another thread may wait for the server."""
        if self._child is not None:
            stop(self._child, timeout_s)

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def log_tail(self) -> str:
        """Return the last lines of this start's log, with a heading; nothing after ``stop``."""
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        begin = max(self._log_start, size - 65536)
        written = os.pread(self._log.fileno(), size - begin, begin)  # does not move the shared offset
        lines = [each for each in written.decode(errors="replace").splitlines() if not each.startswith(_LEAKS)]
        return "\n".join([f"The end of {self.log_path or 'its log'}:", *lines[-_LOG_TAIL_LINES:]])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def cause_of_death(code: int) -> str:
    """Describe an exit code; negative codes are signals."""
    if code == -9:
        return "was killed by signal 9, which the kernel sends when memory runs out (see dmesg), or somebody sent"
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
