"""Settings of the embedded server and ports of servers, checked before a process starts. Imports no torch."""

from __future__ import annotations

import itertools
import os
import random
import socket
from typing import Any, TypeVar

from pydantic import ValidationError

from areal_lite.config.schema import meaning_of
from areal_lite.config.server_config import EmbeddedServerConfig
from areal_lite.errors import ConfigError

C = TypeVar("C", bound=EmbeddedServerConfig)
_PORTS = range(20000, 32000)  # below the ports that Linux gives to outgoing connections


def server_config(**settings: Any) -> EmbeddedServerConfig:
    return checked_settings(EmbeddedServerConfig, settings)


def checked_settings(kind: type[C], settings: dict[str, Any]) -> C:
    """Build the config class ``kind`` from field names and values; raises ConfigError with every fault."""
    try:
        return kind(**settings)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    known = ", ".join(kind.__dataclass_fields__)
    lines = []
    for fault in faults:
        name = str(fault["loc"][0])
        if fault["type"] == "unexpected_keyword_argument":
            lines.append(f"the embedded server has no setting {name!r}; it has {known}.")
        else:
            rule = fault["msg"].replace("Input should", "it must")
            lines.append(f"{name} is {fault['input']!r}: {rule}. {meaning_of(kind, name)}")
    raise ConfigError("\n".join(lines))


def cpu_threads(config: EmbeddedServerConfig) -> int:
    """Return the CPU threads of the model: those of ``config``, or half of the cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return config.num_threads or max(1, cores // 2)


def check_port(host: str, port: int) -> None:
    if (reason := _fault(host, port)) is not None:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}): stop the process that uses the port, choose another, or use "
            "port 0 to take a free one."
        )


def free_ports(host: str, count: int) -> list[int]:
    free = (port for port in random.SystemRandom().sample(_PORTS, len(_PORTS)) if _fault(host, port) is None)
    ports = list(itertools.islice(free, count))
    if len(ports) < count:
        raise ConfigError(f"too few ports from {_PORTS[0]} to {_PORTS[-1]} are free on {host}: set server.port")
    return ports


def _fault(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None
