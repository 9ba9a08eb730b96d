"""The Ray cluster that a run uses: a named one, or a local one that it starts and stops. Never whatever cluster Ray on
its own finds on the machine, maybe another user's."""

import importlib.util
import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from areal_lite.cluster.remote_program import kill_all
from areal_lite.config.run_config import RayConfig
from areal_lite.errors import ConfigError, ServerError
from areal_lite.processes import process_tree
from areal_lite.processes.child_process import ChildProcess
from areal_lite.processes.place import stop
from areal_lite.processes.ports import fault, free_ports

logger = logging.getLogger(__name__)

LOCAL = "local"
LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/]+):\d{1,5}")
_NOT_COPIED = ("/.git", "/.venv", "/runs")
MAX_COPIED = 100 * 2**20
_OBJECT_STORE_BYTES = 2**27  # nothing of a run is in it
_HEAD_S = 3.0  # seconds without a connection after which the head is lost; Ray itself waits a minute


def choose_address(configured: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the address of the cluster, ``local`` for one of the run's own, and a line that says which and why."""
    for key, address in (("ray.address", configured), ("RAY_ADDRESS", environ.get("RAY_ADDRESS"))):
        if address and address != LOCAL and not _ADDRESS.fullmatch(address):
            raise ConfigError(
                f"{key} is {address!r}: name the head of the cluster as HOST:PORT, such as 10.0.0.2:6379, or 'local' "
                "for a Ray of this run alone"
            )
        if address and address != LOCAL:
            return address, f"joining the Ray cluster at {address}, which {key} names"
        if address:
            return LOCAL, f"starting a Ray of this run alone, as {key} says"
    return LOCAL, "starting a Ray of this run alone: neither ray.address nor RAY_ADDRESS names a cluster"


def check_ray(config: RayConfig) -> None:
    """Check before anything starts that Ray is installed and its address one; raises ConfigError."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("launch is ray, and Ray is not installed: run `pip install 'areal-lite[ray]'`")
    choose_address(config.address, os.environ)
    runtime_env(config)


def runtime_env(config: RayConfig) -> dict[str, Any]:
    """Return the config's, without folders that no node needs; raises ConfigError if too much would be copied."""
    folder = Path(config.runtime_env.get("working_dir", ""))
    if "working_dir" not in config.runtime_env or not folder.is_dir():
        return config.runtime_env
    entries = [entry for entry in folder.iterdir() if f"/{entry.name}" not in _NOT_COPIED]
    sizes = Counter({e.name: sum(f.lstat().st_size for f in (e, *e.rglob("*")) if f.is_file()) for e in entries})
    if sizes.total() > MAX_COPIED:
        largest = ", ".join(f"{name} with {size >> 20} MiB" for name, size in sizes.most_common(3))
        raise ConfigError(
            f"ray.runtime_env.working_dir {folder} has {sizes.total() >> 20} MiB, and at most {MAX_COPIED >> 20} are "
            f"copied to the nodes; largest: {largest}. Move them to a shared path, or name a smaller folder"
        )
    excludes = [*config.runtime_env.get("excludes", ()), *_NOT_COPIED]
    return {**config.runtime_env, "excludes": excludes}


@contextmanager
def ray_session(config: RayConfig, *, num_cpus: float) -> Iterator[None]:
    """Connect this process to the cluster; a program that has connected itself keeps its connection. A local Ray has at
    least the ``num_cpus`` that the run reserves: its programs share this machine with or without Ray."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to anybody
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, each process would make an environment
        "RAY_ENABLE_AUTO_CONNECT": "0",  # a late call of a thread would start another Ray
    }
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        logger.info("using the Ray cluster that this program is connected to")
        yield
        return
    address, line = choose_address(config.address, os.environ)
    logger.info("%s", line)
    with ExitStack() as stack:
        if address == LOCAL:
            address = stack.enter_context(_own_head(max(num_cpus, os.cpu_count() or 1)))
        import ray  # which reads the mode of authentication

        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, runtime_env=runtime_env(config), log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ServerError(
                f"Ray at {address}: {str(error).strip() or type(error).__name__}. Does `ray status` answer there? For "
                "a cluster with a token set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token"
            ) from None
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray's own would end the run between two lines
        stack.callback(ray.shutdown)
        over = threading.Event()
        stack.callback(over.set)
        threading.Thread(target=_watch_head, args=(address, over), name="Ray head watch", daemon=True).start()
        yield


def _watch_head(address: str, over: threading.Event) -> None:
    """End this process and its programs on all nodes once nothing accepts connections at ``address``."""
    host, _, port = address.rpartition(":")
    seen = time.monotonic()
    while not over.wait(_HEAD_S / 6):
        with suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_S / 2).close()
            seen = time.monotonic()
        if time.monotonic() > seen + _HEAD_S and not over.is_set():
            logger.error("the head of the Ray cluster at %s is lost: ending here; the same command resumes", address)
            kill_all()
            os._exit(ServerError.exit_code)


@contextmanager
def _own_head(num_cpus: float) -> Iterator[str]:
    """Run a Ray of this machine and yield its address; all of it ends with this process, however that ends.
    ``ray.init`` could start one too, but if this process is killed, agents of that Ray wait a minute for its head."""
    (port,) = free_ports(LOOPBACK, 1)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--port={port}", f"--num-cpus={num_cpus:g}", "--include-dashboard=false"]
    command += [f"--node-ip-address={LOOPBACK}", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # kept: Ray reads it once in a process
    with tempfile.TemporaryFile() as log:
        tree = [sys.executable, "-I", "-S", process_tree.__file__, "[{}, [], []]", str(Path.cwd()), *command]
        head = ChildProcess(tree, environment=dict(os.environ), output=log)
        try:
            while fault(LOOPBACK, port) is None:
                if head.wait(0.1) is not None:
                    log.seek(0)
                    raise ServerError(f"Ray could not be started: {log.read().decode(errors='replace')[-2000:]}")
            yield f"{LOOPBACK}:{port}"
        finally:
            stop(head, 5.0)
