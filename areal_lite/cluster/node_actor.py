"""The launcher of one program on its node: an actor of Ray that starts it and reports its output and end.

Guarantees that the program ends with the actor, also if that is killed: it is a :class:`.ChildProcess`, tied by a pipe
whose other end the kernel closes. Ray ends an actor that is neither named nor detached with the driver or the placement
group. Reports are plain data: an exception of ours might not survive its pickle.
"""

import hashlib
import os
import platform
import re
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from areal_lite.processes.child_process import ChildProcess
from areal_lite.processes.ports import free_ports

_MAX_PIECE = 2**16
_PACKAGES = ("areal-lite", "ray", "torch", "transformers")


class NodeActor:
    """Runs one program, beside calls that end it."""

    def __init__(self, folder: str, *, is_copied: bool) -> None:
        """Work in ``folder``, or in Ray's copy of it."""
        self._moved = folder, os.getcwd() if is_copied else folder  # noqa: PTH109
        with suppress(OSError):  # the facts tell
            os.chdir(self._moved[1])
        self._program: ChildProcess | None = None

    def _there(self, text: str) -> str:
        """Return a text in which the paths of the folder that its copy has are those of the copy."""
        folder, copy = self._moved

        def moved(found: re.Match[str]) -> str:
            path = copy + found[0].removeprefix(folder)
            return path if os.path.exists(path) else found[0]  # noqa: PTH110

        return re.sub(rf'{re.escape(folder)}(?![\w.-])[^":,]*', moved, text)

    def facts(self, model_path: str) -> tuple[str, dict[str, str]]:
        """Return the address of the node and what must agree with the run's machine."""
        import ray

        return ray.util.get_node_ip_address(), node_facts(model_path)

    def sees(self, path: str) -> bool:
        return os.path.exists(path)  # noqa: PTH110

    def clock(self) -> float:
        return time.time()

    def free_port(self, host: str) -> int:
        return free_ports(host, 1)[0]

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, int | bytes | str]]:
        """Start the program and yield ``pid``, or ``failed`` with the reason, then each ``output``, and last ``exit``
        with its code. What it left running may hold its output open, so the end is that of the program."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if gpus:
            environment = {**environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        if "PYTHONPATH" in environment:
            environment = {**environment, "PYTHONPATH": self._there(environment["PYTHONPATH"])}
        command = [self._there(word) for word in command]
        printed, output = os.pipe()
        ended, on_end = os.pipe()
        os.set_blocking(printed, False)
        try:
            self._program = ChildProcess(
                command, environment=environment, output=output, on_end=lambda: os.close(on_end)
            )
        except OSError as error:
            yield "failed", str(error)
            return
        yield "pid", self._program.pid
        has_ended = False
        while not has_ended:
            has_ended = ended in select.select([printed, ended], [], [])[0]
            with suppress(BlockingIOError):
                while piece := os.read(printed, _MAX_PIECE):
                    yield "output", piece
        yield "exit", self._program.wait() or 0

    def end(self, *, kill: bool) -> None:
        if self._program is not None:
            self._program.kill() if kill else self._program.terminate()


def node_facts(model_path: str) -> dict[str, str]:
    """Return, by name, what this process finds on its node and all nodes must have."""
    config = Path(model_path, "config.json")
    return {
        "folder": str(Path.cwd()),
        "Python": platform.python_version(),
        "areal_lite in": str(Path(__file__).parents[1]),
        f"config.json of {model_path}": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else "none",
        **{found.name: found.version for found in distributions() if found.name in _PACKAGES},
    }
