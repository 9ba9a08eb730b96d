"""Keeps the weights of all servers at the version that the run wants."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from areal_lite.errors import ServerError
from areal_lite.infra.backends.dialect import Dialect
from areal_lite.infra.server_pool import Server, ServerPool
from areal_lite.infra.server_requests import REQUEST_ERRORS, ServerRequests

logger = logging.getLogger(__name__)


class Reconciler:
    """Sends weight updates to every server."""

    def __init__(
        self, pool: ServerPool, requests: ServerRequests, dialect: Dialect, must_stay: Callable[[Server], bool]
    ) -> None:
        """Start with servers that have the run's weights.

        Args:
            pool: All servers.
            requests: Sends the calls.
            dialect: The servers'.
            must_stay: Whether a server runs an answer that it could not continue after an abort.
        """
        self._pool = pool
        self._requests = requests
        self._dialect = dialect
        self._must_stay = must_stay

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every server load the checkpoint folder at ``path`` as ``version``.

        Running requests are aborted and continue from their tokens under the new weights. A server
        that fails gets no more requests until a later update succeeds on it.

        Raises:
            ServerError: If the update failed on all servers.
        """
        servers = self._pool.servers
        errors = await asyncio.gather(*(self._update_one(server, path, version) for server in servers))
        if all(errors):  # none is behind another, so all keep serving the weights they have
            raise ServerError(f"no server took policy version {version} from {path}: {errors[0]}")
        for server, error in zip(servers, errors, strict=True):
            server.behind = error
            if error is not None:
                logger.error("%s failed to load version %d and gets no requests: %s", server.url, version, error)

    async def _update_one(self, server: Server, path: str, version: int) -> str | None:
        try:
            await self._requests.control(server, self._dialect.pause(keep=self._must_stay(server)))
            try:
                for call in self._dialect.update_weights(path, version):
                    await self._requests.control(server, call)
            finally:
                await self._requests.control(server, self._dialect.resume())
        except (ServerError, *REQUEST_ERRORS) as error:
            return str(error) or repr(error)
        return None
