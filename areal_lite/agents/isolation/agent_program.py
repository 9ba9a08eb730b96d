"""Programs that an agent runs: few variables, a folder of their own, limits, and no process left behind.

Guarantees that the program and all processes that it started, daemons too, are killed when the program ends, at its
timeout, when its episode is stopped, and when this process dies. Outside Linux, only those of its process group. It
limits accidents; it is not a sandbox: a program can kill its supervisor, and what runs as another user stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from areal_lite.api import episode_context
from areal_lite.api.trajectory import ProcessRecord

KEPT_BYTES = 64 * 1024
"""Bytes kept of each output, the last ones."""
_SUPERVISOR = """
import contextlib, ctypes, json, os, resource, select, signal, sys
line = int(sys.argv[2])
os.set_inheritable(line, False)
with contextlib.suppress(AttributeError):  # only Linux has it
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
wake, woken = os.pipe()
os.set_blocking(woken, False)
signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
signal.signal(signal.SIGCHLD, lambda *_: None)
program = os.fork()
if program == 0:
    os.setsid()
    for name, limit in json.loads(sys.argv[1]).items():
        kind = getattr(resource, name, None)
        if limit is not None and kind is not None:
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
    try:
        os.execvp(sys.argv[3], sys.argv[3:])
    except OSError as error:
        sys.exit(f"{sys.argv[3]}: {error.strerror}")

def reap(flags):
    global status
    pid, ended = os.waitpid(-1, flags)
    if pid == program:
        status = ended
    return pid

def killed(pid):
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/stat") as stat:
            if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
                os.kill(int(pid), signal.SIGKILL)
                return True

status = None
with contextlib.suppress(ChildProcessError):
    while status is None and line not in select.select([line, wake], [], [])[0]:
        os.read(wake, 4096)
        while reap(os.WNOHANG):
            pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program, signal.SIGKILL)
    while status is None or any([killed(name) for name in os.listdir("/proc") if name.isdigit()]):
        reap(0)
if os.WIFSIGNALED(status):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""
"""Starts the program in a session of its own with its limits, and ends as it does.

When the program ends or the pipe closes, it kills all processes below it. They include those that left the program's
process group or were orphaned: as a subreaper, it becomes the parent of orphans.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What one program may use; None is unlimited."""

    cpu_s: int | None = 3600
    """CPU seconds of each process."""
    memory_bytes: int | None = 8 * 2**30
    """Data memory of each process; libraries that are only mapped do not count."""
    file_bytes: int | None = 2**30
    """Size of each file it writes."""
    processes: int | None = 8192
    """Processes and threads of the user, all programs together; no limit for root."""


async def run_program(
    command: Sequence[str], folder: str, environment: Mapping[str, str], limits: ProcessLimits, timeout_s: float | None
) -> ProcessRecord:
    """Run a program and return how it ended; also recorded in the running episode."""
    _check_command(command, folder, environment["PATH"])
    program = _Program(command, folder, environment, limits)
    ended = _end_of(program)
    done: set[asyncio.Future[ProcessRecord]] = set()
    try:
        done, _ = await asyncio.wait([ended], timeout=timeout_s)
    finally:  # also when the episode is stopped
        program.kill()
        record = replace(await ended, timed_out=not done)
        if (episode := episode_context.current().episode) is not None:
            episode.processes.append(record)
    return record


def _check_command(command: Sequence[str], folder: str, path: str) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(f"the command is {command!r}: give a list, such as ['bash', '-c', 'make test']")
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"cwd {folder!r} is no folder")
    name = str(command[0])
    if shutil.which(str(Path(folder, name)) if "/" in name else name, path=path) is None:
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


class _Program:
    def __init__(
        self, command: Sequence[str], folder: str, environment: Mapping[str, str], limits: ProcessLimits
    ) -> None:
        self._command = [str(part) for part in command]
        self._started = time.monotonic()
        names = dict(zip(asdict(limits), ("CPU", "DATA", "FSIZE", "NPROC"), strict=True))
        resources = {f"RLIMIT_{names[key]}": value for key, value in asdict(limits).items()}
        life_line, self._held_open = os.pipe()
        supervisor = [sys.executable, "-I", "-S", "-c", _SUPERVISOR, json.dumps(resources), str(life_line)]
        try:
            self._process = subprocess.Popen(
                [*supervisor, *self._command],
                cwd=folder,
                env=dict(environment),
                pass_fds=(life_line,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._held_open)
            raise
        finally:
            os.close(life_line)
        self._outputs = [_Output(self._process.stdout), _Output(self._process.stderr)]

    def kill(self) -> None:
        os.close(self._held_open)

    def finish(self) -> ProcessRecord:
        """Wait until the program and all that it started have ended, and return what it left."""
        self._process.wait()
        seconds = time.monotonic() - self._started
        stdout, stderr = (output.text() for output in self._outputs)
        return ProcessRecord(
            command=self._command,
            returncode=self._process.returncode,
            timed_out=False,
            seconds=seconds,
            stdout=stdout,
            stderr=stderr,
        )


class _Output:
    """Reads an output to its end and keeps the last ``KEPT_BYTES``."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._kept = bytearray()
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while piece := os.read(self._pipe.fileno(), 1 << 16):
                self._kept += piece
                del self._kept[:-KEPT_BYTES]

    def text(self) -> str:
        """Return the last bytes as text; does not wait for what could not be killed."""
        self._thread.join(timeout=1)
        return bytes(self._kept).decode(errors="replace")


def _end_of(program: _Program) -> asyncio.Future[ProcessRecord]:
    """Wait for a program in a thread of its own: the loop's own few threads may all wait for programs."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[ProcessRecord] = loop.create_future()

    def end(record: ProcessRecord) -> None:
        if not ended.done():
            ended.set_result(record)

    def run() -> None:
        record = program.finish()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, record)

    threading.Thread(target=run, daemon=True).start()
    return ended
