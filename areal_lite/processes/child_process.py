"""A program as a child process that cannot outlive this process: the one supervisor, for servers, workers and writers.

Guarantees that the program and everything in its process group are killed when the program ends, on ``kill``, and when
this process ends, also by SIGKILL; and that a Ctrl-C at the terminal reaches only this process. A thread per program
waits for its end: freeing gigabytes takes the kernel a while, and no event loop may wait for it. Until that thread has
reaped the leader, its id names the group and no other process, so a signal cannot hit a stranger. A process that left
the group for a session of its own survives, unless the program is the script :mod:`.process_tree`.
"""

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from multiprocessing import spawn
from pathlib import Path
from typing import IO, Any, NamedTuple
from areal_lite.errors import ConfigError
from areal_lite.files.safe_text import SECRET_VARIABLE

DEFAULT_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""Variables of processes: one thread each, as many share the cores, and the same order of sets in all."""


def main_command(module: str, *arguments: int | str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """Return the command that calls ``main(*arguments)`` of ``module``; ``python`` ends with the interpreter. This one
    finds modules where this process does; another one where it does itself, or beside this package."""
    others = f"['', *sys.path, {str(Path(__file__).parents[2])!r}]"
    path = "json.loads(sys.argv[1])" if python[-1] == sys.executable else others
    program = f"import json, sys; sys.path[:] = {path}; from {module} import main; main{arguments}"
    return [*python, "-P", "-c", program, json.dumps(sys.path)]


class PickledObject(NamedTuple):
    """An object as a child process loads it: after ``multiprocessing.spawn.prepare(preparation)``."""

    name: str
    key: bytes
    preparation: dict[str, Any]
    pickled: bytes


def pickled_object(value: Any, *, name: str, hint: str) -> PickledObject:
    """Return what a child process needs to load ``value``; raises ConfigError."""
    try:
        pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ConfigError(f"{name} cannot be sent to a process: {error}. {hint}") from None
    # What multiprocessing passes to a spawned child: import path, arguments, where the main script is.
    preparation: dict[str, Any] = {**spawn.get_preparation_data("child")}
    preparation.pop("authkey", None)
    main_keys = {"init_main_from_name", "init_main_from_path"} & preparation.keys()
    if b"__main__" not in pickled:
        for key in main_keys:  # running the script in every process may load torch
            del preparation[key]
    elif not main_keys:
        raise ConfigError(f"{name} lives in an interactive session, which no process can import. {hint}")
    elif not _is_guarded(script := str(sys.modules["__main__"].__file__)):
        raise ConfigError(
            f"{name} lives in {script}, which every process would run again as a whole: put the script's main part "
            "under `if __name__ == '__main__':`, or move what is sent to a module of its own"
        )
    return PickledObject(name, hashlib.sha256(pickled).digest(), preparation, pickled)


def prepare(sent: PickledObject, *, elsewhere: bool) -> None:
    """Prepare this process to load ``sent``; ``elsewhere``, import path and folder stay those of its command."""
    left_out = ("sys_path", "dir", "orig_dir") if elsewhere else ()
    spawn.prepare({key: value for key, value in sent.preparation.items() if key not in left_out})


def _is_guarded(script: str) -> bool:
    """Return whether the script has an ``if`` about ``__name__`` at its top level; True if it cannot be read."""
    try:
        statements = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return True
    tests = (ast.walk(statement.test) for statement in statements if isinstance(statement, ast.If))
    return any(isinstance(node, ast.Name) and node.id == "__name__" for test in tests for node in test)


class ChildProcess:
    """A running program, the leader of its process group; a thread calls ``on_end`` once all of it has ended."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: IO[bytes] | int | None,
        errors: int = subprocess.STDOUT,
        pass_fds: Sequence[int] = (),
        on_end: Callable[[], object] = bool,
    ) -> None:
        life_line, self._held_open = os.pipe()  # one for each: the kernel signals one group per pipe
        try:
            self._process = Context().run(  # of no episode, whoever needs it first
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else errors,
                env=environment,
                pass_fds=(life_line, *pass_fds),
                start_new_session=True,
            )
            # Nobody writes to this pipe: SIGIO, which ends a process, comes to the whole group when our end closes. A
            # parent-death signal would come when the *thread* that started the program ends.
            fcntl.fcntl(life_line, fcntl.F_SETOWN, -self.pid)
            fcntl.fcntl(life_line, fcntl.F_SETFL, fcntl.fcntl(life_line, fcntl.F_GETFL) | os.O_ASYNC)
        except BaseException:
            os.close(self._held_open)
            raise
        finally:
            os.close(life_line)
        self._on_end = on_end
        self._ended = threading.Event()
        threading.Thread(target=self._reap, name=f"wait for {self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code once the program has ended, negative for a signal; None after ``timeout_s``."""
        return self._process.returncode if self._ended.wait(timeout_s) else None

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # a waitpid(-1) of code that shares this process was first
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            os.killpg(self.pid, signal.SIGKILL)  # its leader is not reaped yet, so the group is there
        self._process.wait()
        os.close(self._held_open)
        self._ended.set()
        self._on_end()


def start_python(
    module: str,
    descriptors: Sequence[int],
    *arguments: int,
    on_end: Callable[[], object] = bool,
    python: Sequence[str] = (sys.executable,),
) -> ChildProcess:
    """Start a process that calls ``main(*descriptors, *arguments)`` of ``module`` and shares this one's output; in a
    box, that is with more than an interpreter in ``python``, without the variables that hold secrets."""
    own = Context().run(dict, os.environ)  # of no episode, whoever needs it first
    kept = {name: value for name, value in own.items() if len(python) == 1 or not SECRET_VARIABLE.search(name)}
    return ChildProcess(
        main_command(module, *descriptors, *arguments, python=python),
        environment=DEFAULT_VARIABLES | kept,
        output=None,
        pass_fds=descriptors,
        on_end=on_end,
    )
