"""Forks Python programs from a process that has imported torch and transformers, which takes seconds in each new one.

:func:`install` replaces ``subprocess.Popen`` in a process of tests. ``python -m areal_lite...``, torchrun and its
ranks, scripts of this repository, workers and writers of dumps, and programs whose first line is ``IN_A_FORK`` then
begin in a fork of the server below; every other command starts as always. To its starter and itself such a program is
like one that was started: the same parent, process group, files, directory, variables, ``sys.argv`` and ``sys.path``,
and it ends through the interpreter's end, but for 6.

What makes that true, step by step, since none of it shows when it is wrong:

1. The server has one thread, so a fork finds no lock held by a thread that is gone. It checks this before each fork.
2. The program is a grandchild of the server. Its own parent ends at once, and orphans go to their nearest ancestor that
   is a "child subreaper": the process of tests, which is one only for that moment. A subreaper for good would have to
   reap the orphans of tests that kill a run, and until then they would look alive.
3. The program gets a server of its own for the programs that it starts, forked before any thread. It ends with the
   program, whose end of their connection closes then.
4. A fork cannot change what libraries read from the environment at import. A command whose variables differ there
   (``_READ_AT_IMPORT``) starts as always, as does one with another interpreter or with flags. The number of threads is
   set again.
5. A writer of dumps loads transformers as if torch were missing: what transformers keeps of finding torch is undone.
6. Servers, workers and other children of a run, of which there are many, end as soon as all their code has run.
7. Generators of random numbers are copied by a fork: Python's seeds itself again, numpy's is seeded here, and torch's
   begins with the same seed in every process anyway.
"""

from __future__ import annotations
import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import socket
import struct
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
_READ_AT_IMPORT = ("OMP_", "GOMP_", "HF_", "TRANSFORMERS_", "TORCH_", "CUDA_", "MALLOC_", "LD_", "CXX", "PYTHON")
_READ_LATER = (
    *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "OMP_NUM_THREADS",  # by _become()
)
_PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "openai.resources.chat.completions",
    "torch.distributed.run",
    "areal_lite.agents.agent_workflow",
    "areal_lite.cli.main",
    "areal_lite.runs.entry_points",
    "areal_lite.runs.rl_run",
    "areal_lite.runs.supervised_run",
    "areal_lite.rollout.dumps.dump_writer",
    "areal_lite.rollout.workers.worker_process",
    "areal_lite.embedded.routes.control_routes",
    "areal_lite.embedded.routes.generation_routes",
    "areal_lite.tools.run.train",
    "areal_lite.tools.run.progress",
    "numpy.ctypeslib",
    "openai.resources.chat.chat",
)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 64
_LONGEST_COMMAND = 4000
RealPopen = subprocess.Popen
"""For a test whose programs must start as always."""
IN_A_FORK = "# May begin in a fork.\n"
"""First line of a program given as text, or of a script elsewhere, that needs no interpreter of its own."""


def _read_at_import(environment: Any) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_READ_AT_IMPORT) and k not in _READ_LATER}


# -- in the process of tests ---------------------------------------------------------------------------------


class _Client:
    """Starts the server with the first program, and asks it for forks."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._lock = threading.Lock()
        self._connection = connection
        self._process: Any = None

    def can_run(self, command: list[str], environment: dict[str, str]) -> bool:
        """Return whether a fork does what the command would do."""
        if len(command) < 2 or command[0] != sys.executable:
            return False
        if command[1:3] == ["-P", "-c"]:  # as main_command() makes it; the other programs that it starts import little
            ours = any(f"; from areal_lite.{name}" in command[3] for name in ("rollout.", "processes.call_child "))
        elif command[1] == "-c":
            ours = "".join(command[2:3]).startswith(IN_A_FORK)
        elif command[1] == "-m":
            name = command[2] if len(command) > 2 else ""
            ours = name.partition(".")[0] in ("areal_lite", "tests") or name == "torch.distributed.run"
            ours = ours or environment.get("PYTHONPATH", "").partition(os.pathsep)[0].endswith("/fake_packages")
        else:
            script = Path(command[1])
            ours = script.suffix == ".py" and script.resolve().is_relative_to(ROOT)
            ours = ours or (script.is_file() and script.read_bytes().startswith(IN_A_FORK.encode()))
        ours = ours and environment.get("OMP_NUM_THREADS", "").isdigit()
        return ours and _read_at_import(environment) == _read_at_import(os.environ | _ENVIRONMENT)

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Return the process id of the program, a child of this process."""
        body = json.dumps(request).encode()
        with self._lock:
            connection = self.connect()
            prctl = ctypes.CDLL(None).prctl
            prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(connection, [_LENGTH.pack(len(body))], descriptors)
                connection.sendall(body)
                (pid,) = _LENGTH.unpack(connection.recv(_LENGTH.size, socket.MSG_WAITALL))
            finally:
                prctl(_SUBREAPER, 0, 0, 0, 0)
        return int(pid)

    def connect(self) -> socket.socket:
        """Return the connection to the server, which is started before its first program."""
        if self._connection is None:
            self._connection = self._start_server()
        return self._connection

    def _start_server(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        path = {"PYTHONPATH": str(ROOT)}
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), " " * _LONGEST_COMMAND]
            self._process = RealPopen(command, pass_fds=(theirs.fileno(),), env=os.environ | _ENVIRONMENT | path)
        return ours


_client = _Client()


class _Popen(RealPopen):  # type: ignore[type-arg]
    """``subprocess.Popen`` that forks where it can; all else, pipes included, is the base class's."""

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
        restore_signals, gid, gids, uid, umask, start_new_session, process_group,
    ):  # fmt: skip
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        command = [] if isinstance(args, str | bytes) else [os.fsdecode(arg) for arg in args]
        if command[1:2] == ["-u"]:  # as torchrun starts its ranks
            command, environment = [command[0], *command[2:]], environment | {"PYTHONUNBUFFERED": "1"}
        if shell or preexec_fn or executable or not _client.can_run(command, environment):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                restore_signals, gid, gids, uid, umask, start_new_session, process_group,
            )  # fmt: skip
            return
        standard = [number if one == -1 else one for number, one in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "arguments": command[1:],
            "environment": environment,
            "directory": os.path.realpath(cwd or "."),
            "session": start_new_session,
            "targets": [0, 1, 2, *map(int, pass_fds)],
        }
        self.pid = _client.start(request, [*standard, *map(int, pass_fds)])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def start() -> None:
    """Start the server now: nobody waits for it later."""
    _client.connect()


def install(server: socket.socket | None = None) -> None:
    """Make every program that this process starts begin in a fork if it can; ``server`` is a server that runs."""
    global _client
    _client = _Client(server)
    subprocess.Popen = _Popen  # type: ignore[misc]


def children(pid: int, *, recursive: bool = False) -> list[Any]:
    """Return the processes that a program started, without the server of its forks."""
    import psutil  # not installed with the SDKs of agents

    started = psutil.Process(pid).children(recursive=recursive)
    return [one for one in started if __file__ not in one.cmdline()]


# -- in the server -------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return None when the tests end, and the request in the process that is to run it."""
    while True:
        header, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_DESCRIPTORS)
        if not header:
            return None
        (size,) = _LENGTH.unpack(header)
        request: dict[str, Any] = json.loads(connection.recv(size, socket.MSG_WAITALL))
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread of the server may hold a lock"
        pid_reads, pid_writes = os.pipe()
        end_reads, end_writes = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork() > 0:
                os._exit(0)
            if request["session"]:
                os.setsid()  # before the starter has the process id, by which it may signal the group
            os.write(pid_writes, _LENGTH.pack(os.getpid()))
            os.close(end_writes)
            os.read(end_reads, 1)  # ends when the process between ends, and soon the parent is the process of tests
            while os.getppid() == between:  # a program may ask for a signal at its parent's end, which this is not
                os.sched_yield()
            connection.close()
            above = max(*request["targets"], 255) + 1
            kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
            os.closerange(3, above)
            if any(".dump_writer " in one for one in request["arguments"][:3]):  # it starts none
                install()
                _become(request, kept)
                return request
            ours, theirs = socket.socketpair()
            if os.fork() == 0:  # the server of the programs that this one starts
                ours.close()
                for one in kept:
                    os.close(one)
                connection = theirs
                continue
            theirs.close()
            install(ours)
            _become(request, kept)
            return request
        os.close(end_writes)
        os.waitpid(between, 0)
        connection.sendall(os.read(pid_reads, _LENGTH.size))
        for descriptor in (pid_reads, pid_writes, end_reads, *descriptors):
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take the files, directory, variables, import path and name of the request."""
    for descriptor, target in zip(descriptors, request["targets"], strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    shown = b"\0".join(os.fsencode(one) for one in (sys.executable, *request["arguments"]))[:_LONGEST_COMMAND]
    begin = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45])  # arg_start
    ctypes.memmove(begin, shown.ljust(_LONGEST_COMMAND, b"\0"), _LONGEST_COMMAND)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for number, name in (1, "stdout"), (2, "stderr"):
        lines = number == 2 or unbuffered or os.isatty(number)
        errors = "backslashreplace" if number == 2 else None
        stream = open(number, "w", buffering=1 if lines else -1, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if (threads := int(os.environ["OMP_NUM_THREADS"])) != 1:
        sys.modules["torch"].set_num_threads(threads)
    given = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:2] = given  # in place of this file's folder and ROOT


def _run(arguments: list[str]) -> None:
    """Run the program as the interpreter would."""
    if arguments[0] == "-P":
        if ".dump_writer " in arguments[2]:  # it loads its tokenizer as if there were no torch
            from transformers.utils import generic, import_utils

            import_utils.is_torch_available.cache_clear()
            generic._is_torch_available = False
        sys.argv = ["-c", *arguments[3:]]
        program = sys.modules["__main__"] = ModuleType("__main__")
        exec(arguments[2], vars(program))
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        program = sys.modules["__main__"] = ModuleType("__main__")
        exec(arguments[1], vars(program))
    elif arguments[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = arguments[1:]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _run_and_leave(arguments: list[str]) -> None:
    """Run the program, and end without the interpreter's last part, which takes torch apart page by page."""
    code: Any = 0
    try:
        _run(arguments)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _main() -> None:
    install()  # torchrun keeps the Popen that it finds at import
    for name in _PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        os._exit(0)
    arguments = request["arguments"]
    child = arguments[0] == "-P" or arguments[1:2] == ["areal_lite.embedded"]
    (_run_and_leave if child else _run)(arguments)


if __name__ == "__main__":
    _main()
