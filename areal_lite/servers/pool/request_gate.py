"""The requests of a client that may not be sent yet, and who wakes them.

A request waits for one of two reasons: generation is held (by the trainer, or while a server loads weights), or no
server of the pool takes one more request. The second wait is a queue of futures rather than a condition, because a
condition wakes everyone: with 8,000 requests and a server that comes back with room for 64, each of them would look
for a server and queue again. Here a server that has room wakes as many as it takes, the oldest first.

That makes each wake-up a permit which must not be lost. A request that is woken and cancelled in the same turn of the
loop will not use its permit, so it passes it on (see ``until_usable``). A request that is woken and finds the room
taken by a new one queues again, behind; it may be overtaken, but the one that overtook it wakes the next when it ends.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.errors import ServerError
from areal_lite.servers.client.server_requests import ServerRequests
from areal_lite.servers.pool.server_pool import Server, ServerPool

logger = logging.getLogger(__name__)
OUTAGE_LINE_S = 10.0
Holder = Literal["trainer", "update"]


@dataclass(slots=True)
class Outage:
    """Watches a condition: logs it every 10 s, and gives up after ``patience_s``; ``what`` is in the past tense."""

    what: str
    patience_s: float
    since: float | None = None
    said_at: float = 0.0

    def watch(self, lasts: bool, now: float, reason: str) -> ServerError | None:
        """Return the error once it has lasted too long; then, and when it does not last, it begins anew."""
        if not lasts:
            self.since = None
            return None
        if self.since is None:
            self.since = self.said_at = now
        lasted = now - self.since
        if lasted >= self.patience_s:
            self.since = None
            return ServerError(f"{self.what} for {self.patience_s:g} s: {reason}")
        if now - self.said_at >= OUTAGE_LINE_S:
            self.said_at = now
            logger.warning("%s for %.0f s; the run ends after %.0f s: %s", self.what, lasted, self.patience_s, reason)
        return None


class RequestGate:
    """Holds generations back, and lets them through to the servers of ``pool``."""

    def __init__(
        self, pool: ServerPool, *, patience_s: float, on_outage: Callable[[ServerError], None] | None = None
    ) -> None:
        self.pool = pool
        self.running = 0
        self.holders: set[Holder] = set()
        self.servers_changed = asyncio.Event()
        """Set when a server behind a router fails or is back; the router's watch clears it."""
        self._routed = pool.servers[0].is_router
        self._on_outage = on_outage
        self._waiting: deque[asyncio.Future[None]] = deque()  # requests that no server takes now, the oldest first
        self.released = asyncio.Event()
        """Wakes requests that are held back: whoever waits looks at :attr:`holders` again."""
        self._outage = Outage("no inference server was healthy", patience_s)

    @property
    def is_waiting(self) -> bool:
        return self.running > 0 and not self.holders

    def must_stay(self, server: Server) -> bool:
        """Return whether a server runs an answer that it could not continue after an abort."""
        return (self.pool.servers[0] if self._routed else server).staying > 0

    def hold(self, holder: Holder) -> None:
        """Let no request through until this holder and all others release; each server of an update asks for it."""
        self.holders.add(holder)

    def release(self, holder: Holder) -> None:
        self.holders.discard(holder)
        self.wake_held()

    def wake_held(self) -> None:
        self.released.set()
        self.released.clear()

    async def until_usable(self) -> None:
        """Wait until a server may take a request; raises ServerError."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            # set_result only schedules this task, and a cancellation may come before it runs: the room that it was
            # woken for would stay empty until the next answer, or for ever if there is none.
            if waiter.done() and not waiter.cancelled():
                self.wake_one()
            raise

    def wake_one(self) -> None:
        """Wake the oldest waiting request; those that were cancelled are still in the queue, and skipped."""
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():
                waiter.set_result(None)
                return

    def wake_for(self, server: Server) -> None:
        if not self._waiting:  # the usual end of a request
            return
        for _ in range(int(min(len(self._waiting), max(0, server.capacity - server.outstanding)))):
            self.wake_one()

    def wake_all(self) -> None:
        self.wake_held()
        for _ in range(len(self._waiting)):
            self.wake_one()

    def server_changed(self, server: Server) -> None:
        """Act on a server that may take requests again; one behind a router takes none from here."""
        if self._routed:
            self.servers_changed.set()
        else:
            self.wake_for(server)

    def give_up(self, error: ServerError) -> None:
        """Fail all requests that wait for a server, and report the end of patience."""
        if self._on_outage is not None:
            self._on_outage(error)
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():
                waiter.set_exception(ServerError(str(error)))

    def watch_outage(self, servers: Sequence[Server], now: float, *, updating: bool) -> bool:
        """End the waits when patience is over (an update has its own); return whether a server needs watching."""
        lasts = all(s.unhealthy for s in servers) and not any(s.state == "slow" for s in servers)
        if error := self._outage.watch(lasts and self.is_waiting and not updating, now, failures_of(servers)):
            self.give_up(error)
        return any(s.unhealthy for s in servers)


class Servers(NamedTuple):
    """What the parts of an engine client share."""

    config: InferenceEngineConfig
    pool: ServerPool  # the servers themselves, also where generation goes through a router
    requests: ServerRequests
    gate: RequestGate


def failures_of(servers: Sequence[Server]) -> str:
    """Return why the first three servers are unusable, in one line."""
    reasons = [f"{s.url}: {s.reason or s.last_failure or 'no answer yet'}" for s in servers[:3]]
    more = len(servers) - len(reasons)
    return "; ".join(reasons) + (f"; and {more} more" if more else "")
