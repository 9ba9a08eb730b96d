"""How an episode's agent reaches its model, and the programs it may run: ``workflow_context.get().agent``.

A program gets few variables, a folder of its own, and limits. Guarantees that it and all processes that it started,
daemons too, are killed when it ends, at its timeout, when its episode is stopped, and when this process dies. Outside
Linux, only those of its process group. Without ``rollout.agents.sandbox`` this limits accidents alone: a program can
kill its supervisor, and what runs as another user stays.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from areal_lite.api import episode_context
from areal_lite.api.trajectory import ProcessRecord
from areal_lite.processes import process_tree
from areal_lite.processes.child_process import ChildProcess
from areal_lite.processes.sandbox import ProcessLimits, boxed

KEPT_BYTES = 64 * 1024
"""Bytes kept of each output, the last ones."""
_variables: ContextVar[Mapping[str, str]] = ContextVar("areal_lite_environ", default=MappingProxyType({}))


class EpisodeEnviron(os._Environ[str]):
    """``os.environ`` with the variables of the running episode on top, which it can delete; writes go to the process.

    SDK clients made without arguments read address and key from the environment. Many episodes share the process, so
    each sees its own values through a contextvar. Programs that it starts get them by :mod:`.episode_processes`.
    """

    def __getitem__(self, key: str) -> str:
        variables = _variables.get()
        return variables[key] if key in variables else super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return key in _variables.get() or super().__contains__(key)

    def __delitem__(self, key: str) -> None:
        if key in (own := _variables.get()):
            _variables.set({name: value for name, value in own.items() if name != key})
        else:
            super().__delitem__(key)

    def __iter__(self) -> Iterator[str]:
        own = _variables.get()
        yield from own
        yield from (key for key in super().__iter__() if key not in own)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAccess:
    """How one episode's agent reaches its session; valid until ``run()`` returns."""

    base_url: str
    """Address of OpenAI's APIs, ``http://127.0.0.1:PORT/v1``."""
    anthropic_base_url: str
    """Address of Anthropic's and of Gemini's API, ``http://127.0.0.1:PORT``."""
    api_key: str
    http_client: Any
    """An ``httpx.AsyncClient`` that needs no sockets; SDKs take it as ``http_client``."""
    sandbox: str = "none"
    """``rollout.agents.sandbox``."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that SDKs read; give them to a subprocess."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "GOOGLE_GEMINI_BASE_URL": self.anthropic_base_url,
            **dict.fromkeys(("GEMINI_API_KEY", "GOOGLE_API_KEY"), self.api_key),  # the second wins where both are set
        }

    @contextmanager
    def given(self) -> Iterator[None]:
        """Show it to the code that runs in this context and in tasks that it starts."""
        if type(os.environ) is not EpisodeEnviron:
            os.environ.__class__ = EpisodeEnviron  # keeps the object: others hold references to it
        outside = episode_context.current()
        episode_context.enter(outside._replace(agent=self, reward_key=None))  # run() returns the parts itself
        _variables.set(self.environment)
        try:
            yield
        finally:
            episode_context.enter(outside)
            _variables.set({})

    async def run_process(
        self,
        command: Sequence[str],
        *,
        cwd: str | None = None,
        inherit: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        limits: ProcessLimits | None = None,
        timeout_s: float | None = None,
    ) -> ProcessRecord:
        """Run a program in a sandbox of its own; if it is an agent, its SDK finds the model in the environment.

        The program sees PATH, LANG, HOME (its working directory), :attr:`environment` and what ``inherit`` and
        ``variables`` add, no other variable. Its process group is killed when it ends, at the timeout, and when
        the episode is stopped. What it printed is kept in the episode's trajectory.

        Args:
            command: Program and arguments; no shell.
            cwd: Its working directory; None makes an empty one and removes it afterwards.
            inherit: Names of variables it takes from this process.
            variables: Values of further variables.
            limits: What it may use; None is ``ProcessLimits()``. In a sandbox it needs ``network`` to call the model.
            timeout_s: Seconds after which it is killed; None leaves it to the episode's deadline.

        Returns:
            Exit status and the last 64 KiB of each output.

        Raises:
            FileNotFoundError: If there is no such program or folder.
        """
        with working_folder(cwd) as folder:
            environment = {
                "PATH": os.environ.get("PATH", os.defpath),
                "LANG": os.environ.get("LANG", "C.UTF-8"),
                **{name: os.environ[name] for name in inherit if name in os.environ},
                **{"HOME": folder, **self.environment, **(variables or {})},
            }
            return await run_program(self.sandbox, command, folder, environment, limits or ProcessLimits(), timeout_s)


async def run_program(
    sandbox: str,
    command: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    limits: ProcessLimits,
    timeout_s: float | None,
) -> ProcessRecord:
    """Run a program and return how it ended; also recorded in the running episode."""
    _check_command(command, folder, None if sandbox.startswith("docker") else environment["PATH"])
    names = [str(part) for part in command]
    box, watch = boxed(sandbox, names, folder, environment, limits)
    loop, tails, began = asyncio.get_running_loop(), (_Tail(), _Tail()), time.monotonic()
    ended: asyncio.Future[tuple[float, str, str]] = loop.create_future()

    def end() -> None:
        left = time.monotonic() - began, tails[0].text(), tails[1].text()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set_result, left)

    outputs = tails[0].writes, tails[1].writes
    script = [sys.executable, "-I", "-S", process_tree.__file__, json.dumps(watch), folder, *box]
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, process_tree.TO_END)
    try:
        program = ChildProcess(script, environment=environment, output=outputs[0], errors=outputs[1], on_end=end)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for descriptor in outputs:
            os.close(descriptor)
    try:
        await asyncio.wait({ended}, timeout=timeout_s)
    finally:  # also when the episode is stopped
        timed_out = not ended.done()
        program.terminate()
        await asyncio.wait({ended})  # not by itself: a second stop would cancel it
        seconds, stdout, stderr = ended.result()
        code = program.wait()
        assert code is not None
        record = ProcessRecord(
            command=names, returncode=code, timed_out=timed_out, seconds=seconds, stdout=stdout, stderr=stderr
        )
        if (episode := episode_context.current().episode) is not None:
            episode.processes.append(record)
    return record


def _check_command(command: Sequence[str], folder: str, path: str | None) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(f"the command is {command!r}: give a list, such as ['bash', '-c', 'make test']")
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"cwd {folder!r} is no folder")
    name = str(command[0])
    if path is not None and shutil.which(str(Path(folder, name)) if "/" in name else name, path=path) is None:
        raise FileNotFoundError(f"no program {name!r} in {path if '/' not in name else folder}")


@contextmanager
def working_folder(cwd: str | None) -> Iterator[str]:
    """Lend the folder ``cwd``, or an empty one that is removed afterwards."""
    if cwd is not None:
        yield str(Path(cwd).absolute())
        return
    made = tempfile.mkdtemp(prefix="areal-lite-")
    try:
        yield made
    finally:
        threading.Thread(target=shutil.rmtree, args=(made, True)).start()


class _Tail:
    """Reads what is written to a pipe until all have closed it, and keeps the last ``KEPT_BYTES``."""

    def __init__(self) -> None:
        reads, self.writes = os.pipe()
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._read, args=(reads,), daemon=True)
        self._thread.start()

    def _read(self, reads: int) -> None:
        with open(reads, "rb", buffering=0) as pipe:
            while piece := pipe.read(1 << 16):
                self._kept += piece
                del self._kept[:-KEPT_BYTES]

    def text(self) -> str:
        """Return the last bytes as text; does not wait for what could not be killed."""
        self._thread.join(timeout=1)
        return bytes(self._kept).decode(errors="replace")
