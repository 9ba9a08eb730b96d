"""One version of the weights onto one server: the calls, the pause around them, and who has acknowledged what.

A server's load holds its lock from the first call to the last, and reads ``wanted`` only once it has the lock. An
update and a repair may both want to load the same server; the second finds that it has the newest, and does nothing.

A server is forgotten before its load begins rather than after it failed: between the two it may have any mixture of
weights, and an answer that it gives then must not count as one of the version that it acknowledged before.
"""

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from areal_lite.errors import ServerError
from areal_lite.servers.client.server_requests import ADAPTER_PREFIX, REQUEST_ERRORS
from areal_lite.servers.pool.request_gate import Servers
from areal_lite.servers.pool.server_pool import Server
from areal_lite.servers.weights.broadcast_loader import BroadcastLoader
from areal_lite.servers.weights.published_weights import PublishedWeights, WeightBroadcast, WeightFolder

logger = logging.getLogger(__name__)


class WeightLoader:
    def __init__(self, servers: Servers) -> None:
        self._config, self._pool, self._requests, self._gate = servers
        self.wanted: PublishedWeights | None = None  # the newest weights; None before the first update
        self.updating = False  # an update runs; the pauses of its loads hold generation, those of repairs do not
        self._loaded: dict[Server, PublishedWeights] = {}  # the weights that each server acknowledged last
        self._locks: defaultdict[Server, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.broadcasts = BroadcastLoader(servers.requests, timeout_s=servers.config.faults.request_timeout_s)

    def want(self, weights: PublishedWeights) -> Callable[[], None]:
        """Make ``weights`` the newest, and return a function that takes this back."""
        before, loaded = self.wanted, dict(self._loaded)
        acknowledged = {server: (server.version, server.adapter) for server in self._pool.servers}

        def take_back() -> None:
            self.wanted, self._loaded = before, loaded
            for server, had in acknowledged.items():
                server.version, server.adapter = had

        self.wanted = weights
        limits = self._requests.limits
        limits.newest_version = weights.version if before is None else max(weights.version, limits.newest_version)
        return take_back

    def has_newest(self, server: Server) -> bool:
        return self.wanted is not None and self._loaded.get(server) is self.wanted

    def forget(self, server: Server) -> None:
        """Take what a server acknowledged as lost."""
        self._loaded.pop(server, None)
        server.version = server.adapter = None

    def free_older(self) -> None:
        """Drop all weights but the newest; a broadcast is a copy of the whole model in memory."""
        self._loaded = {server: has for server, has in self._loaded.items() if has is self.wanted}

    async def load(self, server: Server) -> None:
        async with self._locks[server]:
            wanted = self.wanted
            assert wanted is not None
            if self.has_newest(server):
                return
            self.forget(server)
            name, dialect = None, self._requests.dialect
            if isinstance(wanted, WeightBroadcast):
                await self.broadcasts.load(server, wanted, lambda: self._paused(server))
            else:
                if wanted.adapters is not None:  # a new name: no earlier load of it is in the way
                    name = f"{ADAPTER_PREFIX}{wanted.version}-{secrets.token_hex(4)}"
                    calls = dialect.load_adapter(name, wanted)
                else:
                    calls = dialect.load_folder(wanted)
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
                    await self._requests.control(server, self._requests.dialect.unload_adapter(name))
        except (KeyError, TypeError, ValueError, ServerError, *REQUEST_ERRORS) as error:  # the next update tries again
            logger.debug("server %s keeps old adapters: %s", server.url, error)

    @asynccontextmanager
    async def _paused(self, server: Server) -> AsyncIterator[None]:
        if self.updating:
            # Before the pause is sent: an answer that it aborts would else be sent on at once, to a server that is
            # about to be paused too, and aborted there without a token.
            self._gate.hold("update")
        keep = self._config.weight_update_pause == "keep" or self._gate.must_stay(server)
        await self._requests.control(server, self._requests.dialect.pause(keep=keep))
        try:
            yield
        finally:
            await self._requests.control(server, self._requests.dialect.resume)

    def hint(self, weights: PublishedWeights) -> str:
        """Return how servers that load adapters are started, if that is what they refused."""
        dialect = self._requests.dialect
        adapters = weights.adapters if isinstance(weights, WeightFolder) else None
        if adapters is None or not (flags := dialect.adapter_flags(adapters)):
            return ""
        words = [f"{name}={value}" for name, value in dialect.adapter_variables.items()]
        for name, value in flags.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            words.append(" ".join([f"--{name}", *map(str, values)]))
        return f". Adapters need servers that were started with {' '.join(words)}"
