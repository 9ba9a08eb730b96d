"""One program on a node, seen from the run.

Guarantees that its end is seen: the actor reports it, or Ray reports the actor or its node lost, and then the program
was killed with it. Ray notices a node that fell silent after some 15 s.
"""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from areal_lite.processes.child_process import DEFAULT_VARIABLES
from areal_lite.processes.place import OnEnd, Program
from areal_lite.processes.token_socket import TokenListener

logger = logging.getLogger(__name__)

_KILL_S = 1.0
_running: set["RemoteProgram"] = set()


def kill_all() -> None:
    """Kill the programs of this process on their nodes, which needs no head of a cluster."""
    for program in [*_running]:
        program.kill()
    for program in [*_running]:
        program.wait(_KILL_S)


class RemoteProgram:
    """A program that a new ``actor`` starts, and that ends it; ``name`` says which and where, for people."""

    def __init__(
        self, actor: Any, name: str, command: Sequence[str], environment: Mapping[str, str], output: int, on_end: OnEnd
    ) -> None:
        """Start it; raises OSError. The descriptor ``output`` gets what it prints."""
        from ray.exceptions import RayError

        self._actor = actor
        self._name = name
        self._code = -signal.SIGKILL  # of a program that is lost: it was killed with its actor
        self._ended = threading.Event()
        self._reports = actor.run.options(num_returns="streaming").remote(list(command), dict(environment))
        try:
            kind, value = self._next()
        except RayError as error:
            raise OSError(f"{name} is lost: {next(iter(str(error).splitlines()), '')}") from None
        if kind == "failed":
            raise OSError(value)
        self.pid = int(value)
        _running.add(self)
        threading.Thread(target=self._follow, args=(os.dup(output), on_end), name=name, daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self._code if self._ended.wait(timeout_s) else None

    def terminate(self) -> None:
        if not self._ended.is_set():
            self._actor.end.remote(kill=False)

    def kill(self) -> None:
        if not self._ended.is_set():
            self._actor.end.remote(kill=True)

    def _next(self) -> Any:
        import ray

        return ray.get(next(self._reports))

    def _follow(self, output: int, on_end: OnEnd) -> None:
        import ray

        try:
            kind = ""
            while kind != "exit":
                kind, value = self._next()
                if kind == "output":
                    os.write(output, value)
            self._code = value
        except (ray.exceptions.RayError, StopIteration) as error:
            logger.warning("%s is lost: %s", self._name, next(iter(str(error).splitlines()), ""))
        finally:
            os.close(output)
            with suppress(ray.exceptions.RayError):  # no longer connected
                ray.kill(self._actor)  # the bundle is for the actor of the next program
            self._ended.set()
            _running.discard(self)
            on_end()


async def start_over_tcp(
    start: Callable[[Mapping[str, str], OnEnd], Program], host: str, timeout_s: float, on_end: OnEnd
) -> tuple[Program, socket.socket]:
    """Start a program that calls :func:`.token_socket.connect`; return it with its connection to a port of ``host``.
    ``start`` gets the program's environment, in a thread. Raises OSError if it ends or stays silent; ``on_end`` is only
    for the end of a program that is returned."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def note_end() -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(ended.set_result, None)

    listener = TokenListener(host)
    accepting = loop.create_task(listener.accept())
    try:
        environment = DEFAULT_VARIABLES | {**os.environ, **listener.variables}
        program = await asyncio.to_thread(start, environment, note_end)
        first: list[asyncio.Future[Any]] = [accepting, ended]
        await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not accepting.done():
            program.kill()
            how = "ended before it connected" if ended.done() else f"did not connect within {timeout_s:g} s"
            raise OSError(f"process {program.pid} {how}")
        ended.add_done_callback(lambda _: on_end())
        return program, accepting.result()
    finally:
        accepting.cancel()
