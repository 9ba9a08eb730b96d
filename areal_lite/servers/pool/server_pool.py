"""The state of each server, and the choice of the server for a request. Pure bookkeeping: no I/O and no clock.

Guarantees that a request goes to the usable server with the fewest outstanding tokens, that a server which fails or
serves old weights gets no requests, and that each change of a server's state is logged once, with its reason.
"""

import itertools
import logging
import math
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
import numpy as np
from areal_lite.errors import ConfigError
from areal_lite.servers.dialects.dialect import ServerInfo

logger = logging.getLogger(__name__)

State = Literal["up", "slow", "trial", "behind", "down"]
"""Of a server: it answers; it has been silent for long, but answers its health route; it was down or behind and its
first answer is awaited, one request at a time; its weights are outdated, so it gets no requests until it has the
newest; it rests until a probe succeeds."""

FAILURES_TO_OPEN = 3  # failures in a row after which a server rests, see also :data:`REQUESTS_PER_FAILURE`
REQUESTS_PER_FAILURE = 8
"""A server with many running requests rests after one failure in a row for so many of them: errors return before the
answers to requests that were sent with them."""
FIRST_REST_S = 0.5
REST_GROWTH = 1.25  # factor of each rest in a row: a server that is back is missed for at most a quarter of its outage
MAX_REST_S = 30.0
SUCCESSES_TO_GROW = 50  # answers after which a server that said HTTP 429 may run one more request
MAX_REPORTED = 32


@dataclass(slots=True, eq=False)
class Server:
    """One inference server as the client sees it."""

    url: str
    index: int
    is_router: bool = False  # other servers answer for it
    info: ServerInfo = field(default_factory=ServerInfo)
    version: int | None = None  # the last version that it acknowledged; None before the first update
    adapter: str | None = None  # name of the adapter that is this version; None if the version is whole weights

    state: State = "up"
    reason: str = ""  # why it is not up
    said: State = "up"  # the last state that the log has; a trial is not in it
    capacity: float = math.inf  # requests it may run at once; 0 while it is down, behind or waits for its Retry-After
    limit: float = math.inf  # requests it may run at once while it is healthy: halved by HTTP 429, grown by answers
    waits: int = 0
    limited_at: float = 0.0
    unhealthy: bool = False  # it has given no answer since it failed, was down, behind, or said HTTP 429
    failures: int = 0
    last_failure: str = ""
    rest_s: float = 0.0  # its last rest in a row; 0 once it has given an answer
    bad_replies: int = 0
    said_once: set[str] = field(default_factory=set)

    outstanding: int = 0
    load: int = 0  # tokens of its outstanding requests: prompts and budgets
    staying: int = 0  # outstanding requests whose answer it could not continue after an abort
    adapters_in_use: Counter[str] = field(default_factory=Counter)  # outstanding requests by the adapter that they use
    busy_since: float = 0.0  # time from which it has had outstanding requests
    heard: float = 0.0
    requests: int = 0
    tokens: int = 0
    failed_requests: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=512))

    @property
    def usable(self) -> bool:
        return self.outstanding < self.capacity

    @property
    def out(self) -> bool:
        """It gets no requests until it is repaired."""
        return self.state in ("down", "behind")

    def say_once(self, text: str, level: int = logging.INFO) -> None:
        """Log the first of each form of what changes no state, such as a bad reply that is asked for again."""
        form = re.sub(r"(?s)(?<!HTTP )\b\d+|['\"].*", "", text)  # numbers and quotes differ, but not a status
        if form not in self.said_once and len(self.said_once) < MAX_REPORTED:
            self.said_once.add(form)
            logger.log(level, "server %s %s", self.url, text)

    def metrics(self) -> dict[str, float]:
        latencies = sorted(self.latencies) or [0.0]
        return {
            "up": float(self.state in ("up", "slow")),
            "version": float(-1 if self.version is None else self.version),
            "requests": float(self.requests),
            "tokens": float(self.tokens),
            "failures": float(self.failed_requests),
            "bad_replies": float(self.bad_replies),
            "outstanding": float(self.outstanding),
            "latency_p50_s": latencies[len(latencies) // 2],
            "latency_p95_s": latencies[int(0.95 * len(latencies))],
        }


class ServerPool:
    """All servers: routing by outstanding tokens with affinity, a breaker and a concurrency limit per server."""

    def __init__(self, addresses: Sequence[str], *, key: str = "rollout.addresses") -> None:
        if not addresses:
            raise ConfigError(
                "rollout.addresses is empty: name the servers host:port, or run through `areal-lite train`, which "
                "starts an embedded one"
            )
        self.servers = [Server(_url(address, key), index) for index, address in enumerate(addresses)]
        self._loads = np.zeros(len(self.servers))
        """The load of each server, infinite for one that takes no request. As an array, because a loop over a thousand
        servers takes longer than all else in the choice of one."""
        self._changes = itertools.count()

    def pick(self, *, preferred: Server | None = None, avoid: Sequence[Server] = ()) -> Server | None:
        """Return the server for a request; None if no server takes one. ``preferred`` wins while it is usable;
        ``avoid`` (servers that just failed this request) are taken only when nothing else is left."""
        if preferred is not None and preferred.usable and preferred not in avoid:
            return preferred
        if avoid:
            usable = [server for server in self.servers if server.usable]
            others = [server for server in usable if server not in avoid]
            return min(others or usable, key=lambda server: server.load, default=None)
        least = self.servers[int(self._loads.argmin())]
        return least if least.usable else None

    def _changed(self, server: Server) -> None:
        # The fraction lets servers of equal load take turns: the one that changed last comes last.
        turn = next(self._changes) / 2**32
        self._loads[server.index] = server.load + turn if server.usable else math.inf

    def start(
        self, server: Server, tokens: int, now: float, *, adapter: str | None = None, stays: bool = False
    ) -> None:
        if not server.outstanding:
            server.busy_since = now
        server.outstanding += 1
        server.requests += 1
        server.load += tokens
        server.staying += stays
        if adapter is not None:
            server.adapters_in_use[adapter] += 1
        self._changed(server)

    def end(self, server: Server, tokens: int, *, adapter: str | None = None, stays: bool = False) -> None:
        server.outstanding -= 1
        server.load -= tokens
        server.staying -= stays
        if adapter is not None:
            server.adapters_in_use[adapter] -= 1
            if not server.adapters_in_use[adapter]:
                del server.adapters_in_use[adapter]
        self._changed(server)

    def succeeded(self, server: Server, tokens: int, latency_s: float, now: float) -> None:
        """Count an answer; it closes the breaker and grows a lowered limit."""
        server.tokens += tokens
        server.latencies.append(latency_s)
        server.heard = now
        if server.unhealthy and not server.out:
            self.recovered(server)
        if server.limit is not math.inf:
            server.limit += 1 / SUCCESSES_TO_GROW
            self._refresh(server)

    def recovered(self, server: Server) -> None:
        server.unhealthy = False
        server.failures, server.rest_s = 0, 0.0
        self.set_state(server, "up", "it answers again")

    def failed(self, server: Server, reason: str, *, at_once: bool = False) -> bool:
        """Count a failed request, and return whether the server now has to rest. It rests from the third failure in a
        row on, later if it runs many requests, or ``at_once``."""
        server.failures += 1
        server.failed_requests += 1
        server.last_failure = reason
        server.unhealthy = True
        enough = server.failures >= max(FAILURES_TO_OPEN, server.outstanding // REQUESTS_PER_FAILURE)
        if server.state == "down" or not (at_once or server.state == "trial" or enough):
            server.say_once(f"{reason}; such requests are sent again")
            return False
        self.rest(server, reason)
        return True

    def rest(self, server: Server, reason: str) -> None:
        """Send no requests until it has answered a probe, after a longer time for each rest in a row."""
        server.rest_s = min(MAX_REST_S, max(FIRST_REST_S, server.rest_s * REST_GROWTH))
        self.set_state(server, "down", reason)

    def set_state(self, server: Server, state: State, reason: str = "") -> None:
        server.state = state
        server.reason = "" if state == "up" else reason
        server.unhealthy = server.unhealthy or state != "up"
        self._refresh(server)
        if state not in ("trial", server.said):
            server.said = state
            logger.warning("server %s is %s: %s", server.url, "back" if state == "up" else state, reason)

    def throttled(self, server: Server, reason: str, *, sent: float, now: float) -> None:
        """Halve the limit of a server that said HTTP 429, once for all requests that were running then."""
        server.unhealthy = True
        server.last_failure = reason
        server.say_once(f"{reason}; it gets fewer requests")
        if sent >= server.limited_at:
            server.limit = max(1.0, min(server.limit, server.outstanding) / 2)
            server.limited_at = now
            self._refresh(server)

    def wait(self, server: Server, change: int) -> None:
        """Begin (1) or end (-1) a Retry-After, in which it gets no requests."""
        server.waits += change
        self._refresh(server)

    def _refresh(self, server: Server) -> None:
        server.capacity = 0 if server.out or server.waits > 0 else 1 if server.state == "trial" else server.limit
        self._changed(server)

    def metrics(self) -> dict[str, float]:
        shown = self.servers[:MAX_REPORTED]
        return {f"{server.index}/{name}": value for server in shown for name, value in server.metrics().items()}


def _url(address: str, key: str) -> str:
    url = address if "://" in address else f"http://{address}"
    host, _, port = url.partition("://")[2].rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{key} holds {address!r}: write host:port, for example 127.0.0.1:30000")
    return url.rstrip("/")
