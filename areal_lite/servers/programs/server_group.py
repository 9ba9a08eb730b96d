"""The servers that a run starts: started together, watched, restarted, stopped.

A server that ends is restarted, on this machine at its address, at most ``MAX_RESTARTS`` times within
``RESTART_WINDOW_S`` of uptime; its next end is the group's. It restarts with the run's first weights: the engine gives
it the newest ones before it gets requests, and running answers continue from their tokens.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self
from areal_lite.config.server_config import ServerConfig, check_server
from areal_lite.errors import ArealLiteError, ServerError
from areal_lite.processes.place import Places, here
from areal_lite.servers.programs import server_program
from areal_lite.servers.programs.embedded_server import EMBEDDED_PROGRAM, EmbeddedProgram
from areal_lite.servers.programs.server_process import ServerProcess, cause_of_death
from areal_lite.servers.programs.server_program import RouterProgram, ServedModel, ServerProgram, gpu_groups

if TYPE_CHECKING:
    from areal_lite.rollout.remote_inf_engine import RemoteInfEngine

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
STOP_SECONDS = 5.0


def check_servers(config: ServerConfig, *, on_nodes: bool = False) -> None:
    """Check before anything starts that the servers can be, here or ``on_nodes`` of a cluster; raises ConfigError."""
    check_server(config)
    server_program.check_programs(config)
    if not on_nodes:
        gpu_groups(config)


def make_servers(
    config: ServerConfig, model: ServedModel, log_dir: Path, *, program: str = EMBEDDED_PROGRAM, places: Places = here
) -> list[ServerProcess]:
    """Return the servers of a checked config and its router, if it has one; not yet started, with logs in ``log_dir``.
    ``program`` is the module that an embedded server runs; ``places`` has one for each ``server-NUMBER``."""
    backend = config.backend or "embedded"
    servers: list[ServerProcess] = []
    groups = gpu_groups(config) if places is here else [None] * config.replicas  # on nodes, Ray names them
    for number, (gpus, port) in enumerate(zip(groups, server_program.server_ports(config), strict=True)):
        name, log_path = f"server {backend}-{number}", log_dir / f"{backend}-{number}.log"
        reports_port = backend == "embedded" and not config.port
        env = config.env if gpus is None else config.env | {"CUDA_VISIBLE_DEVICES": gpus}
        own, place = replace(config, port=0 if reports_port else port, env=env), places(f"server-{number}")
        make: Callable[..., ServerProcess]
        make = ServerProgram if backend != "embedded" else partial(EmbeddedProgram, program=program)
        servers.append(make(name, own, model, log_path=log_path, place=place))
    if config.router:
        servers.append(RouterProgram(config, log_path=log_dir / "router.log"))
    return servers


class ServerGroup:
    """Servers that run inside a ``with`` statement; ``meanwhile`` is called while they start."""

    def __init__(self, servers: Sequence[ServerProcess], meanwhile: Callable[[], object] = lambda: None) -> None:
        self._servers, self._meanwhile = servers, meanwhile
        self._changed = threading.Condition()  # guards the fields below; notified of a failure
        self._stopping = False
        self._failure: ServerError | None = None
        self._engine: RemoteInfEngine | None = None
        self._watchers: list[threading.Thread] = []

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self._servers if not isinstance(server, RouterProgram)]

    @property
    def router(self) -> str | None:
        return next((server.address for server in self._servers if isinstance(server, RouterProgram)), None)

    def __enter__(self) -> Self:
        logger.info("starting %s", ", ".join(server.name for server in self._servers))
        try:
            for server in self._servers:
                server.launch()
            self._meanwhile()
            for server in self._servers:
                server.wait_until_ready()
        except BaseException:
            self._stop()
            raise
        for server in self._servers:
            self._watchers.append(threading.Thread(target=self._watch, args=(server,), name=server.name, daemon=True))
            self._watchers[-1].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._engine = None
        for server in self._servers:
            server.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for server in self._servers:
            server.end(max(0.0, deadline - time.monotonic()))
        for watcher in self._watchers:
            watcher.join()
        for server in self._servers:
            server.stop()

    def attach(self, engine: "RemoteInfEngine | None") -> None:
        """End the calls of this engine if the group fails."""
        with self._changed:
            self._engine = engine
            if engine is not None and self._failure is not None:
                engine.fail(self._failure)

    def wait_for_failure(self) -> NoReturn:
        with self._changed:
            self._changed.wait_for(lambda: self._failure)
            assert self._failure is not None
            raise self._failure

    def _watch(self, server: ServerProcess) -> None:
        """Restart a server whenever it ends; runs in a thread of its own."""
        deaths_at = [float("-inf")] * MAX_RESTARTS  # in seconds of uptime
        uptime_s, up_since, error, address = 0.0, time.monotonic(), "", server.address
        while (code := server.wait()) is not None:
            uptime_s += time.monotonic() - up_since
            restart = uptime_s - deaths_at[-MAX_RESTARTS] > RESTART_WINDOW_S
            deaths_at.append(uptime_s)
            if not self._mark_down(server, error or f"{_full_name(server)} {cause_of_death(code)}", restart=restart):
                return
            try:
                server.wait_until_ready()
                error = ""
                self._mark_up(server, address)
                address = server.address
            except ArealLiteError as failure:
                error = str(failure)
            up_since = time.monotonic()

    def _mark_down(self, server: ServerProcess, cause: str, *, restart: bool) -> bool:
        """Launch a server that ended again, if ``restart``, or fail; return False if it stays down."""
        with self._changed:
            if self._stopping:
                return False
            if restart:
                logger.warning("%s. Restarting it", cause)
                try:
                    server.launch()
                except OSError as error:
                    self._fail(f"{cause}\nIt cannot be started again: {error}")
                    return False
            else:
                times = f"{MAX_RESTARTS + 1} times within {RESTART_WINDOW_S / 60:g} minutes"
                self._fail(f"{cause.rstrip()}\nIt ended {times}, so it is not restarted. {server.log_tail()}")
        return restart

    def _fail(self, message: str) -> None:
        self._failure = ServerError(message)
        if self._engine is not None:
            self._engine.fail(self._failure)
        self._changed.notify_all()

    def _mark_up(self, server: ServerProcess, former: str) -> None:
        with self._changed:
            if not self._stopping:
                logger.warning("%s is up again at %s", _full_name(server), server.address)
                if self._engine is not None and server.address != former:  # on another node
                    self._engine.move_server(former, server.address)


def _full_name(server: ServerProcess) -> str:
    """Return the name of a server, in a cluster with its node and log."""
    node = server.place.node
    return f"{server.name}{node} (log {server.log_path})" if node else server.name
