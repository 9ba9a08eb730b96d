"""Keeps every server at the state that the run wants: reachable, not paused, this model, the newest weights.

Each server that differs has one task that brings it back while the others serve: probe until it answers, compare what
it reports, load the newest weights, resume. A watch looks once a second while something differs, else every 15 s, for
servers that are silent and for outages. Guarantees that a server serves only after it has acknowledged the newest
version, and that no wait here outlives :meth:`close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.errors import ConfigError, ServerError
from areal_lite.servers.client.model_identity import ModelIdentity
from areal_lite.servers.client.server_requests import ADAPTER_PREFIX, REQUEST_ERRORS, RefusedError, ServerRequests
from areal_lite.servers.dialects.dialect import Dialect, ErrorReply
from areal_lite.servers.pool.server_pool import Server, ServerPool
from areal_lite.servers.weights.broadcast_update import WeightGroups
from areal_lite.servers.weights.published_weights import AdapterFolder, PublishedWeights, WeightBroadcast

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Seconds between two looks while something differs."""
IDLE_WATCH_S = 15.0
SILENCE_S = 60.0
"""Seconds without anything from a server that generates before its health is probed."""
SILENT_PROBES = 2
"""Health probes that a silent server must miss before its requests go elsewhere."""
OUTAGE_LINE_S = 10.0
START_TIMEOUT_S = 30.0
"""Seconds a server has to answer at the start."""
STRAGGLER_S = 30.0
"""Seconds that an update waits at least for other servers once one has it."""

_ERRORS = (ServerError, ErrorReply, *REQUEST_ERRORS)


class Reconciler:
    """Watches and repairs servers from :meth:`open` to :meth:`close`, on one event loop."""

    def __init__(
        self,
        config: InferenceEngineConfig,
        pool: ServerPool,
        requests: ServerRequests,
        dialect: Dialect,
        *,
        must_stay: Callable[[Server], bool],
        on_change: Callable[[Server], None],
        on_pause: Callable[[], None],
        is_waiting: Callable[[], bool],
        on_outage: Callable[[ServerError], None],
        identity: ModelIdentity | None = None,
    ) -> None:
        """Start with unknown servers.

        Args:
            config: Time limits.
            pool: All servers.
            requests: Sends the calls.
            dialect: The servers'.
            must_stay: Whether a server runs an answer that it could not continue after an abort.
            on_change: Called with a server that may take requests again.
            on_pause: Called before an update pauses a server.
            is_waiting: Whether there are requests to answer.
            on_outage: Called when the servers stay away longer than ``outage_patience_s``.
            identity: The run's model, which servers are compared with.
        """
        self._config = config
        self._pool = pool
        self._requests = requests
        self._dialect = dialect
        self._must_stay = must_stay
        self._on_change = on_change
        self._on_pause = on_pause
        self._is_waiting = is_waiting
        self._on_outage = on_outage
        self._identity = identity or ModelIdentity.unknown()
        self.wanted: PublishedWeights | None = None
        """The newest weights; None before the first update."""
        self.newest: int | None = None
        """The newest version that any server was given."""
        self._locks = {server: asyncio.Lock() for server in pool.servers}
        self._loaded: dict[Server, PublishedWeights] = {}
        """What each server acknowledged last."""
        self._groups = WeightGroups(requests, dialect, timeout_s=config.faults.request_timeout_s)
        self._tasks: dict[Server, asyncio.Task[None]] = {}
        """What repairs or examines a server."""
        self._others: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._outage_since: float | None = None
        self._said_at: float
        self._updating = False
        self._closed = False

    # -- start and end ---------------------------------------------------------------------------

    async def open(self) -> None:
        """Ask every server what it serves, resume it, and start to watch.

        Raises:
            ServerError: If no server answers.
            ConfigError: If a server speaks another protocol or serves another model.
        """
        failures = await asyncio.gather(*(self._meet(server) for server in self._pool.servers))
        if all(failures):
            raise ServerError(
                f"no inference server answers: {'; '.join(f for f in failures if f)}. Are they up, and does "
                "rollout.addresses name them?"
            )
        for server, failure in zip(self._pool.servers, failures, strict=True):
            if failure is not None:
                self.failed(server, failure, at_once=True)
        self._own(asyncio.create_task(self._watch()))

    async def close(self) -> None:
        """Stop watching."""
        self._closed = True
        tasks = [*self._tasks.values(), *self._others]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        self._groups.close()

    def _own(self, task: asyncio.Task[None]) -> None:
        def on_end(_: object) -> None:
            self._others.discard(task)
            if not task.cancelled():
                task.exception()  # it was acted on where it matters

        self._others.add(task)
        task.add_done_callback(on_end)

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
        """Compare what a server reports with the run's model, and resume it: it may have been left paused.

        Raises:
            ConfigError: If it serves another model.
            ErrorReply, aiohttp.ClientError, TimeoutError, OSError: If it does not answer.
        """
        server.info = await self._requests.info(server)
        self._identity.check(server.url, server.info)
        self._requests.respect(server.info)
        if server.info.paused:
            logger.warning("server %s is paused: resuming it", server.url)
        try:
            await self._requests.control(server, self._dialect.resume())
        except RefusedError as error:  # servers that only generate may have no control routes
            logger.debug("%s", error)

    # -- changes of state ------------------------------------------------------------------------

    def failed(self, server: Server, reason: str, *, at_once: bool = False) -> None:
        """Count a failure; a server that fails too often rests until it answers a probe."""
        if self._pool.failed(server, reason, at_once=at_once):
            self._repair(server)

    def behind(self, server: Server, reason: str) -> None:
        """Send a server no requests until it has loaded the newest weights again; a second time in a row it rests."""
        self._forget(server)
        if server.trial:
            self._pool.rest(server, reason)
        else:
            self._pool.set_behind(server, reason)
        self._repair(server)

    async def examine(self, server: Server) -> bool:
        """Ask a server what it serves; repair it and return True if it does not answer or has outdated weights."""
        try:
            info = await self._requests.info(server)
        except (ErrorReply, *REQUEST_ERRORS) as error:
            self.failed(server, str(error) or type(error).__name__, at_once=True)
            return True
        if self.wanted is None:
            return False
        if self._has_newest(server) and info.version not in (None, self.wanted.version):
            self.behind(server, f"it acknowledged version {self.wanted.version} and reports version {info.version}")
        return not self._has_newest(server)

    def _repair(self, server: Server) -> None:
        self._wake.set()
        if server not in self._tasks:
            self._begin(server, self._bring_back(server))

    def _begin(self, server: Server, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[server] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._on_end(server))

    def _on_end(self, server: Server) -> None:
        del self._tasks[server]
        if not self._closed and (server.down is not None or server.behind is not None):
            self._repair(server)

    async def _bring_back(self, server: Server) -> None:
        """Return once the server may get requests again."""
        was_down = False
        while server.down is not None or server.behind is not None:
            if server.down is not None:
                was_down = True
                await asyncio.sleep(server.rest_s)
            try:
                if was_down:
                    await self._compare(server)
                    self._groups.drop(server)  # a restarted server is not in it
                    if self.wanted is not None and server.info.version != self.wanted.version:
                        self._forget(server)  # it may have restarted with other weights
                if self.wanted is not None:
                    await self._load(server)
                if self.wanted is None or self._has_newest(server):  # else there were newer ones meanwhile
                    self._pool.try_again(server)
            except (ConfigError, *_ERRORS) as error:
                self._pool.rest(server, str(error) or type(error).__name__)
        self._on_change(server)

    async def _load(self, server: Server) -> None:
        """Have a server load the newest weights; raises what went wrong."""
        async with self._locks[server]:
            wanted = self.wanted
            assert wanted is not None
            if self._has_newest(server):
                return
            self._forget(server)
            name = None
            if isinstance(wanted, WeightBroadcast):
                await self._groups.load(server, wanted, lambda: self._paused(server))
            else:
                if isinstance(wanted, AdapterFolder):  # a new name: no earlier load of it is in the way
                    name = f"{ADAPTER_PREFIX}{wanted.version}-{secrets.token_hex(4)}"
                    calls = self._dialect.load_adapter(name, wanted)
                else:
                    calls = self._dialect.load_folder(wanted)
                async with self._paused(server):
                    for call in calls:
                        await self._requests.control(server, call, timeout_s=self._config.faults.request_timeout_s)
            self._loaded[server], server.version, server.adapter = wanted, wanted.version, name
            if name is not None:
                await self._unload_all_but({name, *server.adapters_in_use}, server)

    async def _unload_all_but(self, needed: set[str], server: Server) -> None:
        """Unload the adapters of earlier versions, also those of runs that ended."""
        try:
            for name in await self._requests.adapters(server):
                if name not in needed:
                    await self._requests.control(server, self._dialect.unload_adapter(name))
        except (KeyError, TypeError, ValueError, *_ERRORS) as error:  # the next update tries again
            logger.debug("server %s keeps old adapters: %s", server.url, error)

    @contextlib.asynccontextmanager
    async def _paused(self, server: Server) -> AsyncIterator[None]:
        if self._updating:
            self._on_pause()
        keep = self._config.weight_update_pause == "keep" or self._must_stay(server)
        await self._requests.control(server, self._dialect.pause(keep=keep))
        try:
            yield
        finally:
            await self._requests.control(server, self._dialect.resume())

    def _has_newest(self, server: Server) -> bool:
        return self.wanted is not None and self._loaded.get(server) is self.wanted

    def _forget(self, server: Server) -> None:
        self._loaded.pop(server, None)
        server.version = server.adapter = None

    # -- updates ---------------------------------------------------------------------------------

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Have every server load ``weights``.

        Running requests are aborted and continue from their tokens under the new weights. Returns once all servers
        that take part have it; one that fails or lags gets no requests until it has caught up in the background. If
        no server can be reached, waits for one as long as ``outage_patience_s``.

        Raises:
            ServerError: If all servers refused, which keep what they serve, or none came back in time.
        """
        before, self.wanted = self.wanted, weights
        self.newest = max(weights.version, self.newest or 0)
        self._updating = True
        loaded, versions = dict(self._loaded), {s: (s.version, s.adapter) for s in self._pool.servers}
        loads = {asyncio.create_task(self._load(s)): s for s in self._pool.servers if s.down is None}
        for task in loads:
            self._own(task)
        try:
            await self._until_enough(set(loads))
            errors = {server: _error_of(task) for task, server in loads.items()}
            if errors and len(errors) == len(versions) and all(isinstance(e, RefusedError) for e in errors.values()):
                self.wanted, self._loaded = before, loaded  # none is behind another: all serve what they have
                for server, had in versions.items():
                    server.version, server.adapter = had
                raise ServerError(f"no server took {weights}: {next(iter(errors.values()))}{self._hint(weights)}")
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
            self._updating = False
        self._loaded = {server: has for server, has in self._loaded.items() if has is weights}  # frees older ones
        for task in loads:
            if task.done() and self._has_newest(loads[task]):
                self._pool.caught_up(loads[task])

    def _hint(self, weights: PublishedWeights) -> str:
        """Return how servers that load adapters are started, if that is what they refused."""
        if not isinstance(weights, AdapterFolder) or not (flags := self._dialect.adapter_flags(weights.shape)):
            return ""
        words = [f"{name}={value}" for name, value in self._dialect.adapter_variables.items()]
        for name, value in flags.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            words.append(" ".join([f"--{name}", *map(str, values)]))
        return f". Adapters need servers that were started with {' '.join(words)}"

    async def _until_enough(self, pending: set[asyncio.Task[None]]) -> None:
        """Return when all loads have ended; once one has succeeded, the rest gets as long again, at least 30 s."""
        started = time.monotonic()
        done: set[asyncio.Task[None]] = set()
        while pending and None not in map(_error_of, done):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=max(STRAGGLER_S, time.monotonic() - started))

    async def _until_one_has(self, weights: PublishedWeights) -> None:
        """Return once a server has the version; servers that are being repaired get ``outage_patience_s``."""
        patience, waited = self._config.faults.outage_patience_s, time.monotonic()
        said = waited
        while not any(s.down is None and self._has_newest(s) for s in self._pool.servers):
            now = time.monotonic()
            if now - waited >= patience:
                raise ServerError(f"no server took {weights} in {patience:g} s: {self._why()}")
            if now - said >= OUTAGE_LINE_S:
                said = now
                logger.warning(
                    "no server has taken version %d for %.0f s: %s", weights.version, now - waited, self._why()
                )
            tasks = list(self._tasks.values())
            await asyncio.wait(tasks, timeout=min(WATCH_S, patience)) if tasks else await asyncio.sleep(0)

    # -- watching --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            now = time.monotonic()
            for server in self._pool.servers:
                if _silent_s(server) >= SILENCE_S and server not in self._tasks and not self._updating:
                    self._begin(server, self._examine(server))
            differs = self._look_for_outage(now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S if differs else IDLE_WATCH_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _examine(self, server: Server) -> None:
        """Tell a slow server from a hung one: only the slow one answers its health route."""
        reason = f"nothing from it for {_silent_s(server):.0f} s while {server.outstanding} requests run"
        for _ in range(SILENT_PROBES):
            with contextlib.suppress(*_ERRORS):  # it may be paused: another run paused it, or our resume was lost
                await self._requests.control(server, self._dialect.resume())
            healthy = await self._requests.is_healthy(server)
            if _silent_s(server) < SILENCE_S:  # it has answered meanwhile
                return
            if healthy:
                if server.down is None and not server.slow:
                    self._pool.set_slow(server, f"{reason}, but it is healthy")
                return
        self._pool.failed(server, f"{reason}, and no answer to its health probes", at_once=True)
        self._requests.give_up(server, "the server hangs")

    def _look_for_outage(self, now: float) -> bool:
        """Say every 10 s that no server is healthy, and end the wait when patience is over; return what to watch."""
        servers = self._pool.servers
        outage = all(s.unhealthy for s in servers) and self._is_waiting()
        if not outage or self._updating or all(s.state == "slow" for s in servers):
            self._outage_since = None
            return any(s.unhealthy for s in servers)
        if self._outage_since is None:
            self._outage_since = self._said_at = now
        lasted, patience = now - self._outage_since, self._config.faults.outage_patience_s
        if lasted >= patience:
            self._outage_since = None
            self._on_outage(ServerError(f"no inference server is healthy since {patience:g} s: {self._why()}"))
        elif now - self._said_at >= OUTAGE_LINE_S:
            self._said_at = now
            logger.warning(
                "no inference server is healthy since %.0f s; the run ends after %.0f s: %s",
                lasted,
                patience,
                self._why(),
            )
        return True

    def _why(self) -> str:
        reasons = [
            f"{s.url}: {s.down or s.behind or s.last_failure or 'no answer yet'}" for s in self._pool.servers[:3]
        ]
        more = len(self._pool.servers) - len(reasons)
        return "; ".join(reasons) + (f"; and {more} more" if more else "")


def _silent_s(server: Server) -> float:
    """Return for how many seconds a server with running requests has sent nothing; 0 without any."""
    return time.monotonic() - max(server.heard, server.busy_since) if server.outstanding else 0.0


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    """Return why a load has not succeeded."""
    if not task.done():
        return TimeoutError("it takes far longer than on other servers")
    return asyncio.CancelledError() if task.cancelled() else task.exception()
