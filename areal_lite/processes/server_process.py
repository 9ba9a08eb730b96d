"""An inference server as a child process: what a run needs of it, whatever program it is. Imports no torch."""

from __future__ import annotations

import os
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Self

from areal_lite.errors import ConfigError, ServerError
from areal_lite.processes.child_process import ChildProcess

_LOG_TAIL_LINES = 30
_PROBE_SECONDS = 0.2


class ServerProcess(ABC):
    """One inference server; ``start`` and ``stop`` it, or use a ``with`` statement.

    It ends with this process, and keeps its address when it is started again after its end.
    """

    def __init__(self, name: str, *, log_path: str | Path | None, start_timeout_s: float) -> None:
        self.name = name
        self.log_path = None if log_path is None else Path(log_path)
        self._start_timeout_s = start_timeout_s
        self._child: ChildProcess | None = None
        self._log: IO[bytes] | None = None
        self._log_start = 0
        self._address: str | None = None
        """None until it is ready for the first time."""

    @abstractmethod
    def _launch(self, output: IO[bytes]) -> ChildProcess:
        """Start the program."""

    def _answers(self, timeout_s: float) -> str | None:
        """Return the address if the server answers a request."""
        raise NotImplementedError

    def _wait_for_answer(self, deadline: float) -> str | None:
        """Return the address once the server answers requests; None if it ends, or at the monotonic ``deadline``."""
        while (left_s := deadline - time.monotonic()) > 0 and self.wait(min(left_s, _PROBE_SECONDS)) is None:
            if address := self._answers(max(1.0, left_s)):
                return address
        return None

    @property
    def address(self) -> str:
        if self._address is None:
            raise ServerError(f"{self.name} is not running; call start(), or use a with statement.")
        return self._address

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code once the server has ended, negative for a signal; None after ``timeout_s``."""
        return None if self._child is None else self._child.wait(timeout_s)

    def launch(self) -> None:
        """Start the program; :meth:`wait_until_ready` must follow."""
        if self._child is not None and self.poll() is None:
            raise ServerError(f"{self.name} is already started (pid {self.pid}); create another one.")
        if self._log is None or self._log.closed:
            if self.log_path is None:
                self._log = tempfile.TemporaryFile()  # noqa: SIM115
            else:
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
                self._log = self.log_path.open("a+b")
        self._log_start = self._log.seek(0, os.SEEK_END)
        self._child = self._launch(self._log)

    def wait_until_ready(self) -> None:
        """Return once the server answers requests; raises ConfigError or ServerError."""
        try:
            address = self._wait_for_answer(time.monotonic() + self._start_timeout_s)
            if address is None and (code := self.poll()) is not None:
                raise self._start_error(code)
            if address is None:
                raise ServerError(
                    f"{self.name} was not ready after {self._start_timeout_s:.0f} s. Is the model too large for this "
                    f"machine? If not, raise start_timeout_s. {self.log_tail()}"
                )
        except BaseException:
            self.stop()
            raise
        self._address = address

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
            self._child.stop(timeout_s)

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
        lines = written.decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([f"The end of {self.log_path or 'its log'}:", *lines])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def cause_of_death(code: int) -> str:
    """Describe an exit code; negative codes are signals."""
    if code == -9:
        return "was killed by signal 9, which the kernel sends when memory runs out (see dmesg), or somebody sent"
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
