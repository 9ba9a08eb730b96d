"""Free TCP ports for servers."""

import itertools
import random
import socket
from areal_lite.errors import ConfigError

_PORTS = range(20000, 32000)  # below the ports that Linux gives to outgoing connections


def check_port(host: str, port: int) -> None:
    """Check that a server can listen there; raises ConfigError."""
    if (reason := fault(host, port)) is not None:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}): stop the process that uses the port, choose another, or use "
            "port 0 to take a free one."
        )


def free_ports(host: str, count: int) -> list[int]:
    free = (port for port in random.SystemRandom().sample(_PORTS, len(_PORTS)) if fault(host, port) is None)
    ports = list(itertools.islice(free, count))
    if len(ports) < count:
        raise ConfigError(f"too few ports from {_PORTS[0]} to {_PORTS[-1]} are free on {host}: set server.port")
    return ports


def fault(host: str, port: int) -> str | None:
    """Return why nobody can listen there; None for a free port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None
