"""Keeps every server at the state that the run wants: reachable, not paused, this model, the newest weights.

Guarantees that a server gets requests only after it acknowledged the newest version, and no wait outlives ``close``.

A server's state is never set by the code that finds a fault. A failed request, an update, an examination and the watch
only mark the server as down or behind; one task for each such server (``_bring_back``) compares it with what is wanted
*now*, and repeats until nothing differs. Designs that look simpler, and the case that breaks each:

- Repair where the fault is found. Fifty requests that fail together would repair one server fifty times, and the
  cancellation of a request would cancel the repair that all the others wait for.
- Queue the updates that a server missed, and replay them. A server that is away for an hour would load sixty versions
  when it is back. Only the newest counts, so there is one wanted version, and no queue.
- Trust a server that is back from a rest. It may have restarted with the weights that it was started with, and answer
  well; so its version is asked for first, and whatever it acknowledged before counts no more if that differs.

Races, and where they end:

- Newer weights arrive during a repair. ``_bring_back`` lets the server try again only if it has what is wanted after
  its load, which may no longer be what was wanted before it.
- A server fails as its repair ends. ``_repair`` starts no other while its task is registered; ``_on_end`` looks again.
- A load lags behind the other servers in an update. The update does not wait for it beyond ``_until_enough``: the
  server is marked as behind, and the lock of its load makes the repair wait for it rather than load twice.

What can still fail: a server that acknowledges a version and serves another. The engine client compares each answer
with what was acknowledged, and reports the server as :meth:`Reconciler.behind`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any
from areal_lite.errors import ConfigError, ServerError
from areal_lite.servers.client.model_identity import ModelIdentity
from areal_lite.servers.client.server_requests import REQUEST_ERRORS, RefusedError
from areal_lite.servers.dialects.dialect import ErrorReply
from areal_lite.servers.pool.request_gate import Outage, Servers, failures_of
from areal_lite.servers.pool.server_pool import Server
from areal_lite.servers.weights.published_weights import PublishedWeights
from areal_lite.servers.weights.weight_loader import WeightLoader

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Seconds between two looks while something differs."""
IDLE_WATCH_S = 15.0
SILENCE_S = 60.0
"""Seconds without anything from a server that generates before its health is probed."""
SILENT_PROBES = 2
"""Health probes that a silent server must miss before its requests go elsewhere."""
START_TIMEOUT_S = 30.0
STRAGGLER_S = 5.0
"""Seconds that an update waits at least for other servers once one has it; one that is left behind loads on."""

_ERRORS = (ServerError, ErrorReply, *REQUEST_ERRORS)


class Reconciler:
    """Watches and repairs servers from :meth:`open` to :meth:`close`, on one event loop."""

    def __init__(self, servers: Servers, *, identity: ModelIdentity | None = None) -> None:
        self._config, self._pool, self._requests, self._gate = servers
        self._identity = identity or ModelIdentity()
        self._loader = WeightLoader(servers)
        self._tasks: dict[Server, asyncio.Task[None]] = {}
        """The task that repairs or examines a server."""
        self._others: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._closed = False

    async def open(self) -> None:
        """Ask every server what it serves, resume it, and start to watch; raises ServerError or ConfigError."""
        self._closed, self._wake, self._gate.released = False, asyncio.Event(), asyncio.Event()  # of this loop
        self._gate.servers_changed, self._gate.holders = asyncio.Event(), set()
        failures = await asyncio.gather(*(self._meet(server) for server in self._pool.servers))
        if all(failures):
            raise ServerError(
                f"no inference server answers: {'; '.join(f for f in failures if f)}. Are they up, and does "
                "rollout.addresses name them?"
            )
        for server, failure in zip(self._pool.servers, failures, strict=True):
            if failure is not None:
                self.failed(server, failure, at_once=True)
            if server.out:  # also since an earlier open
                self._repair(server)
        self._requests.limits.newest_version = max(server.info.version or 0 for server in self._pool.servers)
        self.own(asyncio.create_task(self._watch()))

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._tasks.values(), *self._others]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        await self._loader.broadcasts.close()

    def own(self, task: asyncio.Task[Any]) -> None:
        """End ``task`` with :meth:`close`."""
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # it was acted on where it matters

    async def _meet(self, server: Server) -> str | None:
        """Learn what a server is; return why it cannot be reached, or None."""
        last = f"{server.url}: no answer in {START_TIMEOUT_S:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                for attempt in range(self._config.request_retries):
                    try:
                        await self._compare(server)
                        return None
                    except ErrorReply as error:
                        last = error.message
                        if error.status < 500 and error.status not in (408, 429):
                            raise ConfigError(
                                f"{last}: it does not speak the protocol of rollout.backend={self._config.backend}. "
                                "Does rollout.addresses name the right port?"
                            ) from None
                    except REQUEST_ERRORS as error:
                        last = f"{server.url}: {str(error) or type(error).__name__}"
                    await asyncio.sleep(0.1 * 2 ** min(attempt, 4))
        return last

    async def _compare(self, server: Server) -> None:
        """Compare what a server reports with the run's model, and resume it: it may have been left paused."""
        server.info = await self._requests.info(server)
        self._identity.check(server.url, server.info)
        self._requests.limits.narrow(server.info)
        if server.info.paused:
            logger.warning("server %s is paused: resuming it", server.url)
        try:
            await self._requests.control(server, self._requests.dialect.resume)
        except RefusedError as error:  # servers that only generate may have no control routes
            logger.debug("%s", error)

    def failed(self, server: Server, reason: str, *, at_once: bool = False) -> None:
        """Count a failure; a server that fails too often rests until it answers a probe."""
        if self._pool.failed(server, reason, at_once=at_once):
            self._repair(server)

    def move(self, former: str, address: str) -> None:
        """Reach the server that was at ``former`` at ``address``, once it has the newest weights there."""
        for server in self._pool.servers:
            if server.url == former:
                server.url = address
                self.failed(server, f"it was at {former}", at_once=True)

    def behind(self, server: Server, reason: str) -> None:
        """Send a server no requests until it has loaded the newest weights again; a second time in a row it rests."""
        self._loader.forget(server)
        if server.state == "trial":
            self._pool.rest(server, reason)
        elif server.state != "down":  # the repair of one that is looks at its weights too
            self._pool.set_state(server, "behind", reason)
        self._repair(server)

    async def examine(self, server: Server) -> bool:
        """Ask a server what it serves; repair it and return True if it does not answer or has outdated weights."""
        try:
            info = await self._requests.info(server)
        except (ErrorReply, *REQUEST_ERRORS) as error:
            self.failed(server, str(error) or type(error).__name__, at_once=True)
            return True
        if (wanted := self._loader.wanted) is None:
            return False
        if self._loader.has_newest(server) and info.version not in (None, wanted.version):
            self.behind(server, f"it acknowledged version {wanted.version} and reports version {info.version}")
        return not self._loader.has_newest(server)

    def _repair(self, server: Server) -> None:
        self._wake.set()
        if server not in self._tasks:
            self._begin(server, self._bring_back(server))

    def _begin(self, server: Server, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[server] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._on_end(server))

    def _on_end(self, server: Server) -> None:
        del self._tasks[server]
        if not self._closed and server.out:
            self._repair(server)

    async def _bring_back(self, server: Server) -> None:
        was_down, loader = False, self._loader
        while server.out:
            if server.state == "down":
                was_down = True
                await asyncio.sleep(server.rest_s)
            try:
                if was_down:
                    await self._compare(server)
                    loader.broadcasts.drop(server)  # one that restarted is in no process group
                    if loader.wanted is not None and server.info.version != loader.wanted.version:
                        loader.forget(server)
                if loader.wanted is not None:
                    await loader.load(server)
                if loader.wanted is None or loader.has_newest(server):
                    self._pool.set_state(server, "trial")
            except Exception as error:  # whatever it is, the server must not be tried without a rest
                self._pool.rest(server, str(error) or type(error).__name__)
                if isinstance(error, TimeoutError) and _silent_s(server) >= SILENCE_S:
                    self._requests.give_up(server, "the server hangs")
        self._gate.server_changed(server)

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Have every server load ``weights``; raises ServerError.

        Running requests are aborted and continue from their tokens under the new weights. Returns once all servers
        that take part have it; one that fails or lags gets no requests until it has caught up in the background. If
        no server can be reached, waits for one as long as ``outage_patience_s``.
        """
        loader, servers = self._loader, self._pool.servers
        take_back = loader.want(weights)
        loader.updating = True
        loads = {asyncio.create_task(loader.load(server)): server for server in servers if not server.out}
        for task in loads:
            self.own(task)
        try:
            await self._until_enough(set(loads))
            errors = {server: _error_of(task) for task, server in loads.items()}
            if errors and len(errors) == len(servers) and all(isinstance(e, RefusedError) for e in errors.values()):
                take_back()  # none is behind another: all serve what they have
                raise ServerError(f"no server took {weights}: {next(iter(errors.values()))}{loader.hint(weights)}")
            for server, error in errors.items():
                if error is not None:
                    reason = str(error) or type(error).__name__
                    self.behind(server, f"version {weights.version} failed to load: {reason}")
            await self._until_one_has(weights)
        except BaseException:
            for task in loads:
                task.cancel()
            raise
        finally:
            loader.updating = False
        loader.free_older()

    async def _until_enough(self, pending: set[asyncio.Task[None]]) -> None:
        """Return when all loads have ended; once one has succeeded, the rest gets as long again, at least 5 s."""
        started = time.monotonic()
        done: set[asyncio.Task[None]] = set()
        while pending and None not in map(_error_of, done):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=max(STRAGGLER_S, time.monotonic() - started))

    async def _until_one_has(self, weights: PublishedWeights) -> None:
        """Return once a server has the version; servers that are being repaired get ``outage_patience_s``."""
        patience, servers = self._config.faults.outage_patience_s, self._pool.servers
        outage = Outage(f"no server took {weights}", patience)
        while not any(s.state != "down" and self._loader.has_newest(s) for s in servers):
            if error := outage.watch(True, time.monotonic(), failures_of(servers)):
                raise error
            tasks = list(self._tasks.values())
            await asyncio.wait(tasks, timeout=min(WATCH_S, patience)) if tasks else await asyncio.sleep(0)

    async def _watch(self) -> None:
        while True:
            now = time.monotonic()
            for server in self._pool.servers:
                if _silent_s(server) >= SILENCE_S and server not in self._tasks and not self._loader.updating:
                    self._begin(server, self._examine(server))
            differs = self._gate.watch_outage(self._pool.servers, now, updating=self._loader.updating)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S if differs else IDLE_WATCH_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _examine(self, server: Server) -> None:
        """Tell a slow server from a hung one: only the slow one answers its health route."""
        reason = f"nothing from it for {_silent_s(server):.0f} s while {server.outstanding} requests run"
        for _ in range(SILENT_PROBES):
            with contextlib.suppress(*_ERRORS):  # it may be paused: another run paused it, or our resume was lost
                await self._requests.control(server, self._requests.dialect.resume)
            healthy = await self._requests.is_healthy(server)
            if _silent_s(server) < SILENCE_S:  # it has answered meanwhile
                return
            if healthy:
                if server.state in ("up", "trial"):  # one on trial may take minutes for its first answer
                    self._pool.set_state(server, "slow", f"{reason}, but it is healthy")
                    self._gate.server_changed(server)
                return
        self._pool.failed(server, f"{reason}, and no answer to its health probes", at_once=True)
        self._requests.give_up(server, "the server hangs")


def _silent_s(server: Server) -> float:
    """Return for how many seconds a server with running requests has sent nothing; 0 without any."""
    return time.monotonic() - max(server.heard, server.busy_since) if server.outstanding else 0.0


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    if not task.done():
        return TimeoutError("it takes far longer than on other servers")
    return asyncio.CancelledError() if task.cancelled() else task.exception()
