"""A program as a child process that cannot outlive this process.

Guarantees that the program and everything in its process group are killed when the program ends, on ``stop``, and when
this process ends, also by SIGKILL; and that a Ctrl-C at the terminal reaches only this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any


def start_tied(
    command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a program in a process group of its own, which is killed when the returned descriptor closes.

    It closes when this process ends, however it ends, unless its owner closes it before.
    """
    life_line, held_open = os.pipe()  # one for each: the kernel signals one group per pipe
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(life_line, *pass_fds), start_new_session=True, **options
        )
        # Nobody writes to this pipe: SIGIO, which ends a process, comes to the whole group when our end closes. A
        # parent-death signal would come when the *thread* that started the program ends.
        fcntl.fcntl(life_line, fcntl.F_SETOWN, -process.pid)
        fcntl.fcntl(life_line, fcntl.F_SETFL, fcntl.fcntl(life_line, fcntl.F_GETFL) | os.O_ASYNC)
    except BaseException:
        os.close(held_open)
        raise
    finally:
        os.close(life_line)
    return process, held_open


class ChildProcess:
    """A running program, the leader of its process group."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: IO[bytes],
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the program; ``output`` gets its stdout and stderr."""
        self._process, self._held_open = start_tied(
            command, pass_fds=pass_fds, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        self._ended = threading.Event()
        threading.Thread(target=self._reap, name=f"wait for {self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id, also of the group."""
        return self._process.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code once the program has ended, negative for a signal; None after ``timeout_s``."""
        return self._process.returncode if self._ended.wait(timeout_s) else None

    def terminate(self) -> None:
        """Ask the program to end."""
        self._signal(signal.SIGTERM)

    def stop(self, timeout_s: float) -> None:
        """Ask the program to end; kill its group if it still runs after ``timeout_s``."""
        self.terminate()
        if self.wait(timeout_s) is None:
            self._signal(signal.SIGKILL)
            self._ended.wait()

    def _signal(self, number: int) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _reap(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        os.killpg(self.pid, signal.SIGKILL)  # its leader is not reaped yet, so the group is there
        self._process.wait()
        self._ended.set()
        os.close(self._held_open)
