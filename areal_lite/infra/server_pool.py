"""Choose the server for each request. Pure bookkeeping: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_lite.errors import ConfigError

FAILURES_TO_OPEN = 3
"""Failures in a row after which a server rests."""
MAX_REST_S = 30.0


@dataclass(slots=True, eq=False)
class Server:
    """One inference server as the client sees it."""

    url: str
    outstanding: int = 0
    failures: int = 0
    """Failures in a row."""
    rest_until: float = 0.0
    """Monotonic time before which it is avoided."""
    behind: str | None = None
    """Why its weights are outdated; such a server gets no requests."""


class ServerPool:
    """Least-outstanding routing with affinity, and a breaker per server."""

    def __init__(self, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ConfigError(
                "rollout.addresses is empty: name the servers host:port, or run through `areal-lite train`, which "
                "starts an embedded one"
            )
        self.servers = [Server(_url(address)) for address in addresses]

    def pick(self, now: float, *, preferred: Server | None = None, avoid: Sequence[Server] = ()) -> Server | None:
        """Return the server for a request, None if no server has usable weights.

        ``preferred`` wins while it is healthy; ``avoid`` (servers that just failed this request) are
        taken only when nothing else is left.
        """
        if preferred is None and len(self.servers) == 1:
            preferred = self.servers[0]
        if preferred is not None and not (preferred.behind or preferred.rest_until > now or preferred in avoid):
            return preferred
        return min(
            (server for server in self.servers if server.behind is None),
            key=lambda s: (s in avoid, s.rest_until if s.rest_until > now else 0.0, s.outstanding),
            default=None,
        )

    def succeeded(self, server: Server) -> None:
        """Close the breaker."""
        server.failures, server.rest_until = 0, 0.0

    def failed(self, server: Server, now: float) -> None:
        """Count a failure; from the third in a row on the server rests, longer each time."""
        server.failures += 1
        if server.failures >= FAILURES_TO_OPEN:
            server.rest_until = now + min(MAX_REST_S, 2.0 ** (server.failures - FAILURES_TO_OPEN))


def _url(address: str) -> str:
    url = address if "://" in address else f"http://{address}"
    host, _, port = url.split("://", 1)[1].rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"rollout.addresses holds {address!r}: write host:port, for example 127.0.0.1:30000")
    return url.rstrip("/")
