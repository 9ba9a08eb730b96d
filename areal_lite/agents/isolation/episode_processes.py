"""Processes that an agent starts by itself, with ``subprocess`` or asyncio: they end with their episode.

Guarantees that a process started in an episode's context, and all below it, is killed when the episode ends, and named
in a warning; on Linux. Not seen: what clears its environment or runs as another user, and what ``os.fork``,
``multiprocessing`` or a thread without the episode's context starts.

Thousands of episodes share one process, so neither parent nor group says whose a process is, and a daemon has left
both. Its environment stays: each episode has a mark there, which all below inherit and ``/proc`` shows. An audit hook
sees each start but cannot add a variable, and uvloop raises no event; so the functions that start are wrapped. Episodes
that start nothing pay for a contextvar. For the others one thread looks through ``/proc``, once for all that wait; not
one of the event loop's, as those may all be waiting for these processes.
"""

import contextlib
import functools
import hashlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any
import uvloop

logger = logging.getLogger(__name__)
_LOOKS = 50  # at most, until the kernel has freed what was killed
_ended: set[bytes] = set()  # marks of ended episodes whose processes have not been looked for
_named: set[str] = set()  # programs that were warned of
_HINT = (
    "end it in run(), or if several episodes share it, start it with contextvars.Context().run(subprocess.Popen, ...)"
)
_thread = ThreadPoolExecutor(1, "end processes")


class EpisodeProcesses:
    """Those that code in this context starts until :meth:`end`; ``key`` names the episode, in any process."""

    def __init__(self, key: str) -> None:
        self._mark = hashlib.sha256(key.encode()).hexdigest()[:32]
        self._has_ended = self.started = False
        _wrap_starts()
        _owner.set(self)

    def environment(self, given: Mapping[Any, Any] | None) -> dict[Any, Any]:
        """Return the environment of a process that starts now; by default, it is as the episode sees it."""
        if self._has_ended:
            raise RuntimeError("the episode has ended: its code must start no more processes")
        self.started = True
        return {**(os.environ if given is None else given), "AREAL_LITE_EPISODE": self._mark}

    def end(self) -> Future[None] | None:
        """Kill them, in another thread; None if there are none. A later start raises."""
        _owner.set(None)
        self._has_ended = True
        if not self.started:
            return None
        _ended.add(f"AREAL_LITE_EPISODE={self._mark}".encode())
        return _thread.submit(_kill_ended)


_owner: ContextVar[EpisodeProcesses | None] = ContextVar("areal_lite_processes", default=None)
current = _owner.get


@functools.cache
def _wrap_starts() -> None:
    for owner, name in (
        (subprocess.Popen, "__init__"),
        (uvloop.Loop, "subprocess_exec"),
        (uvloop.Loop, "subprocess_shell"),
    ):
        setattr(owner, name, _marking(getattr(owner, name)))


def _marking(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def marked(*args: Any, **options: Any) -> Any:
        if (owner := _owner.get()) is not None:
            options["env"] = owner.environment(options.get("env"))
        return start(*args, **options)

    return marked


def _kill_ended() -> None:
    marks = set[bytes]()
    while _ended:
        marks.add(_ended.pop())
    for _ in range(_LOOKS):
        if not (marks and _kill(marks)):
            break
        time.sleep(0.01)


def _kill(marks: set[bytes]) -> bool:
    """Kill the processes with one of these marks in their environment and return whether there were any."""
    found = False
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # it ended, or is another user's
            process = os.pidfd_open(int(folder.name))  # never names another one, whoever gets the number next
            stack.callback(os.close, process)
            if not marks.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                found = True
                program = os.fsdecode((folder / "cmdline").read_bytes().partition(b"\0")[0])
                signal.pidfd_send_signal(process, signal.SIGKILL)
                if program not in _named:
                    _named.add(program)
                    logger.warning("%s still ran when its episode ended, and was killed: %s", program, _HINT)
    return found
