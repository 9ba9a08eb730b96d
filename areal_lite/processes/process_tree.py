"""Run a program so that no process that it starts outlives it. A script that :class:`.ChildProcess` starts.

Guarantees that the program and all processes below it, daemons too, are killed when the program ends, when the script
gets SIGTERM, and when the process that started it dies, which ``ChildProcess`` turns into SIGIO. Outside Linux only
those of the program's process group. The script then ends as the program did, by the same exit code or signal. A
program that with all that it started exceeds ``most`` of its :class:`.sandbox.Box` is killed too.

The program gets a session of its own, so a signal to the script's group does not hit it before the script has acted.
As a subreaper the script is the parent of every orphan below it, so processes are left exactly as long as it has
children; killing one makes its children the script's, hence the loop. Who starts the script blocks ``TO_END``
meanwhile: one that came while Python starts would end the script by its default action, and not as the program ended.
It imports little, since an episode waits for it; pathlib alone takes 10 ms.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys

TO_END = {signal.SIGTERM, signal.SIGIO}
_WAKING = {signal.SIGCHLD, signal.SIGALRM, *TO_END}
_LOOK_S = 0.2  # between two looks at a box; many boxes run at once


def main(box: str, folder: str, *command: str) -> None:
    resources, most, at_end = json.loads(box)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
    for waking in (signal.SIGCHLD, signal.SIGALRM):
        signal.signal(waking, lambda *_: None)  # without a handler some kernels drop it
    with contextlib.suppress(AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    program = os.fork()
    if program == 0:
        _become(resources, folder, command)
    if most:
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    status = _status_of(program, most)
    if at_end:
        silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (1, 2)]
        os.waitpid(os.posix_spawnp(at_end[0], at_end, os.environ, file_actions=silent, setsigmask=()), 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _become(limits: dict[str, int | None], folder: str, command: tuple[str, ...]) -> None:
    """Replace this process by the program."""
    os.setsid()
    os.chdir(folder)
    for entry in os.scandir("/dev/fd"):
        with contextlib.suppress(OSError):  # the one of the listing is closed
            os.set_inheritable(int(entry.name), int(entry.name) < 3)
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if limit is not None and kind is not None:
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKING)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def _status_of(program: int, most: list[int | None]) -> int:
    """Wait for ``program`` or a signal to end it, kill all that is left, and return the program's wait status."""
    statuses: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):  # no process is left
        while program not in statuses and (woken := signal.sigwait(_WAKING)) not in TO_END:
            if woken == signal.SIGALRM and _is_too_large(*most):
                break
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # one signal may stand for many
                statuses.setdefault(*ended)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program, signal.SIGKILL)
        while _kill_children() or program not in statuses:
            statuses.setdefault(*os.waitpid(-1, 0))
    return statuses[program]


def _is_too_large(processes: int | None, memory_bytes: int | None) -> bool:
    """Return whether more processes and threads are below this one, or hold more memory; pages shared by a fork count
    for each. Say so on stderr."""
    waiting, count, size = [str(os.getpid())], -1, 0
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):  # it ended
            for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
                count += 1
                with open(f"/proc/{pid}/task/{thread}/children") as children:  # noqa: PTH123
                    waiting += children.read().split()
            with open(f"/proc/{pid}/statm") as statm:  # noqa: PTH123
                _, resident, shared, *_ = map(int, statm.read().split())
            size += (resident - shared) * resource.getpagesize()
        for name, used, limit in (("processes", count, processes), ("bytes of memory", size, memory_bytes)):
            if limit is not None and used > limit:
                sys.stderr.write(f"killed: the limit of this sandbox is {limit} {name}\n")
                return True
    return False


def _kill_children() -> bool:
    """Kill the children of this process and return whether it had any; without ``/proc`` it finds none."""
    found = False
    for entry in os.scandir("/proc") if os.access("/proc", os.R_OK) else ():
        with contextlib.suppress(OSError, ValueError):  # ended, or no process
            pid = int(entry.name)
            with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
                parent = int(stat.read().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                os.kill(pid, signal.SIGKILL)
                found = True
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
