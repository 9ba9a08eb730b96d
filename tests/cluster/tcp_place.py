"""A place on this machine whose workers connect over TCP, as on other nodes."""

from __future__ import annotations
import socket
from collections.abc import Mapping
from pathlib import Path
from areal_lite.cluster.remote_program import start_over_tcp
from areal_lite.processes.child_process import main_command
from areal_lite.processes.place import HERE, OnEnd, Program


class TcpPlace:
    """Appends the output of its programs to ``log``; ``command`` replaces that of a worker."""

    where = " on node n, log l"

    def __init__(self, log: Path, *, command: list[str] | None = None, timeout_s: float = 60.0) -> None:
        self.log = log
        self.command = command
        self.timeout_s = timeout_s

    async def start_connected(self, module: str, on_end: OnEnd) -> tuple[Program, socket.socket]:
        """Start the module's main."""

        def start(environment: Mapping[str, str], on_end: OnEnd) -> Program:
            with self.log.open("ab") as output:
                return HERE.start(self.command or main_command(module), environment, output, on_end)

        return await start_over_tcp(start, "127.0.0.1", self.timeout_s, on_end)
