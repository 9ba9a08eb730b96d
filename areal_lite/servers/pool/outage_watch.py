"""How long no server has been healthy while requests wait. Pure bookkeeping: the caller brings the clock."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from areal_lite.errors import ServerError
from areal_lite.servers.pool.request_gate import RequestGate
from areal_lite.servers.pool.server_pool import Server

logger = logging.getLogger(__name__)

OUTAGE_LINE_S = 10.0


class OutageWatch:
    def __init__(self, servers: Sequence[Server], gate: RequestGate, *, patience_s: float) -> None:
        self._servers = servers
        self._gate = gate
        self._patience_s = patience_s
        self._since: float | None = None
        self._said_at: float

    def look(self, now: float, *, updating: bool) -> bool:
        """Return whether a server needs watching; an update has a patience of its own."""
        outage = all(s.unhealthy for s in self._servers) and self._gate.is_waiting
        if not outage or updating or all(s.state == "slow" for s in self._servers):
            self._since = None
            return any(s.unhealthy for s in self._servers)
        if self._since is None:
            self._since = self._said_at = now
        lasted, patience_s = now - self._since, self._patience_s
        if lasted >= patience_s:
            self._since = None
            why = failures_of(self._servers)
            self._gate.give_up(ServerError(f"no inference server is healthy since {patience_s:g} s: {why}"))
        elif now - self._said_at >= OUTAGE_LINE_S:
            self._said_at = now
            logger.warning(
                "no inference server is healthy since %.0f s; the run ends after %.0f s: %s",
                lasted,
                patience_s,
                failures_of(self._servers),
            )
        return True


def failures_of(servers: Sequence[Server]) -> str:
    """Return why the first three servers are unusable, in one line."""
    reasons = [f"{s.url}: {s.down or s.behind or s.last_failure or 'no answer yet'}" for s in servers[:3]]
    more = len(servers) - len(reasons)
    return "; ".join(reasons) + (f"; and {more} more" if more else "")
