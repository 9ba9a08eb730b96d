"""The seam between a run and what places its programs, and the place on this machine; ``cluster`` has those of Ray."""

import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol
from areal_lite.processes.child_process import ChildProcess, start_python

OnEnd = Callable[[], object]


class Program(Protocol):
    """A running program with its process group: a :class:`.ChildProcess`, or one on another node."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout_s: float | None = None) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def stop(program: Program, timeout_s: float) -> None:
    """Ask a program to end; kill its group if it still runs after ``timeout_s``."""
    program.terminate()
    if program.wait(timeout_s) is None:
        program.kill()
        program.wait()


class Place(Protocol):
    """Where one program of the run starts, and starts again after its end; its CPUs and GPUs are reserved."""

    @property
    def node(self) -> str:
        """Node of the place, for the end of a name; empty without a cluster."""
        ...

    @property
    def where(self) -> str:
        """The same with the log of the place."""
        ...

    def listen_at(self, host: str, port: int) -> tuple[str, int]:
        """Return where a server of the place listens: a free port of another node, or what the config says."""
        ...

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes], on_end: OnEnd = bool
    ) -> Program:
        """Start a program that ends with this process, and return; raises OSError. ``environment`` are all of its
        variables, but those that name reserved GPUs; a thread calls ``on_end`` when it has ended."""
        ...

    async def start_connected(self, module: str, on_end: OnEnd) -> tuple[Program, socket.socket]:
        """Start a process that calls ``main`` of ``module``; return it with a connected socket; raises OSError."""
        ...


class _Here:
    node = where = ""

    def listen_at(self, host: str, port: int) -> tuple[str, int]:
        return host, port

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes], on_end: OnEnd = bool
    ) -> Program:
        return ChildProcess(command, environment=environment, output=output, on_end=on_end)

    async def start_connected(self, module: str, on_end: OnEnd) -> tuple[Program, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return start_python(module, [theirs.fileno()], on_end=on_end), ours
            except OSError:
                ours.close()
                raise


HERE = _Here()
Places = Callable[[str], Place]
"""Returns the place of a role, such as ``server-0`` or ``worker-1``."""


def how_ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def here(role: str) -> Place:
    return HERE
