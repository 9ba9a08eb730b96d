"""An sglang-router in front of the servers: generation goes to it, everything else to the servers themselves.

The router's replies do not say which server wrote them, so a bad or outdated one makes every server be examined.
Guarantees that a server that is down, behind or found with old weights leaves the router until it serves the newest.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import Any
import aiohttp
import orjson
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.errors import ConfigError, ServerError
from areal_lite.servers.client.server_requests import REQUEST_ERRORS, bounded_body
from areal_lite.servers.pool.reconciler import START_TIMEOUT_S, Reconciler
from areal_lite.servers.pool.request_gate import Outage, Servers
from areal_lite.servers.pool.server_pool import Server, ServerPool

logger = logging.getLogger(__name__)

AFFINITY_HEADER = "X-SMG-Routing-Key"
"""Requests with equal values go to one server, with the router's policies manual and consistent_hashing."""
SYNC_S = 0.2  # seconds between two looks while the router's servers are not as they should be
IDLE_SYNC_S = 5.0
_ERRORS = (ServerError, ValueError, KeyError, TypeError, *REQUEST_ERRORS)
_PASSED_ON = {
    *("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "frequency_penalty", "presence_penalty", "repetition_penalty", "json_schema", "regex", "ebnf"),
    *("skip_special_tokens", "sampling_seed", "no_stop_trim"),
}
"""Sampling parameters that sglang-router 0.3.2 passes on; it drops all others without a word."""


async def servers_behind(config: InferenceEngineConfig) -> InferenceEngineConfig:
    """Return the config with the servers of a router that ``addresses`` names, and the router as ``router``. An address
    of the backend sglang is a router if it lists workers; other configs come back as they are."""
    if config.backend != "sglang" or config.router is not None:
        return config
    timeout = aiohttp.ClientTimeout(total=config.faults.connect_timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        urls = [server.url for server in ServerPool(config.addresses).servers]
        listed = await asyncio.gather(*(_workers_of(session, url) for url in urls))
        routers = [url for url, workers in zip(urls, listed, strict=True) if workers is not None]
        if not routers:
            return config
        if len(urls) > 1:
            raise ConfigError(
                f"{routers[0]} in rollout.addresses is a router, which sends requests to servers of its own: name it "
                "alone, or name the servers in rollout.addresses and the router in rollout.router"
            )
        if config.weight_update == "adapter":
            raise ConfigError(
                f"{routers[0]} in rollout.addresses is a router, and rollout.weight_update is adapter: a request "
                "through it cannot know its server's names of adapters. Use another weight_update, or name the servers"
            )
        workers, deadline = listed[0], time.monotonic() + START_TIMEOUT_S
        while not workers:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the router at {routers[0]} has no servers: start it with --worker-urls, or add them with POST "
                    "/workers"
                )
            await asyncio.sleep(SYNC_S)
            workers = await _workers_of(session, routers[0])
    addresses = sorted(_worker_url(routers[0], worker) for worker in workers)
    logger.info("%s is a router; the servers behind it are %s", routers[0], ", ".join(addresses))
    return replace(config, addresses=addresses, router=routers[0])


async def _workers_of(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]] | None:
    """Return the workers that a router lists; None if it is no router or does not answer."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError):
        for path in ("/workers", "/list_workers"):
            async with session.get(url + path, allow_redirects=False) as reply:
                body = orjson.loads(await bounded_body(reply.content)) if reply.status == 200 else None
            if not isinstance(body, dict):
                continue
            if isinstance(workers := body.get("workers"), list):
                return workers
            if "urls" in body:
                raise ConfigError(
                    f"the router at {url} is older than sglang-router 0.3, which has the route /workers: update it "
                    "(pip install -U sglang-router)"
                )
    return None


def _worker_url(router: str, worker: dict[str, Any]) -> str:
    url, kind = str(worker.get("url")), worker.get("worker_type", "regular")
    if kind != "regular" or not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"the router at {router} has the server {url} ({kind}): use one whose servers do both prefill and decode, "
            "by HTTP"
        )
    return url.rstrip("/")


def router_pool(url: str) -> ServerPool:
    """Return the pool of the generations that go through a router: the router as its only server."""
    pool = ServerPool([url], key="rollout.router")
    pool.servers[0].is_router = True
    return pool


class Router:
    """The router and its list of servers, from :meth:`open` until the reconciler closes."""

    def __init__(self, servers: Servers, reconciler: Reconciler) -> None:
        config, self._servers, self._requests, self._gate = servers
        self._reconciler = reconciler
        self._pool = self._gate.pool
        (self._target,) = self._pool.servers  # the router, as the server of every generation
        self._outage = Outage(f"the router {self._target.url} was unusable", config.faults.outage_patience_s)
        self._blocked = False  # the router has no server that may answer
        self._lock = asyncio.Lock()
        self._examination: asyncio.Task[bool] | None = None

    async def open(self) -> None:
        """Give the router our servers, and return once it has one that answers; raises ServerError or ConfigError."""
        ours = {server.url for server in self._servers.servers}
        last = "it does not list all servers of rollout.addresses"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    try:
                        if strangers := sorted(set(await self._listed()) - ours):
                            raise ConfigError(
                                f"the router at {self._target.url} sends requests to {strangers[0]}, which is not in "
                                "rollout.addresses, so it would not get the weights: write both alike"
                            )
                        if await self.sync():
                            self._reconciler.own(asyncio.create_task(self._watch()))
                            return
                    except (ServerError, *REQUEST_ERRORS) as error:
                        last = str(error) or type(error).__name__
                    await asyncio.sleep(SYNC_S)
        raise ServerError(f"the router at {self._target.url} is not ready: {last}. Is it up, and is it sglang-router?")

    def check_fields(self, body: dict[str, Any]) -> None:
        if "image_data" in body:
            raise ConfigError("the prompt has images, which are not sent through sglang-router: use no rollout.router")
        if dropped := sorted(body["sampling_params"].keys() - _PASSED_ON):
            raise ConfigError(
                f"sglang-router does not pass on the sampling parameter {dropped[0]!r}: leave it out, or use no router"
            )

    def failed(self, _: Server, reason: str, *, at_once: bool = False) -> None:
        self._pool.failed(self._target, reason, at_once=at_once)
        self._gate.servers_changed.set()

    async def _confirm(self) -> None:
        """Examine the servers on trial, as no answer will tell that they are well again."""
        for server in self._servers.servers:
            if server.unhealthy and not server.out:
                if server.state == "trial" and await self._reconciler.examine(server):
                    continue
                self._servers.recovered(server)

    async def update(self, version: int) -> None:
        """Take the servers that lack the newest version out before requests are sent on."""
        self._target.version = version
        with contextlib.suppress(*_ERRORS):  # the watch tries again, and outdated replies are refused
            await self._confirm()
            await self.sync()

    async def examine(self) -> bool:
        """Examine every server after a bad reply; return whether some were found that should not have answered."""
        if self._examination is None or self._examination.done():
            self._examination = asyncio.create_task(self._examine())
            self._reconciler.own(self._examination)
        return await asyncio.shield(self._examination)

    async def _examine(self) -> bool:
        bad = any(await asyncio.gather(*map(self._reconciler.examine, self._serving())))
        with contextlib.suppress(*_ERRORS):
            await self.sync()
        return bad

    async def sync(self) -> bool:
        """Make the router's list of servers ours; return whether it has one that answers; raises ServerError."""
        async with self._lock:
            listed = await self._listed()
            serving = {server.url for server in self._serving()}
            for url in listed.keys() - serving:
                await self._requests.ask(self._target, "DELETE", f"/workers/{listed[url]['id']}")
            for url in serving - listed.keys():
                await self._requests.ask(self._target, "POST", "/workers", {"url": url})
            ready = any(listed[url].get("is_healthy", True) for url in serving & listed.keys())
            if ready == self._blocked:
                self._blocked = not ready
                self._pool.wait(self._target, -1 if ready else 1)
                self._gate.wake_all()
            if self._target.state == "down":
                self._pool.set_state(self._target, "trial")
                self._gate.wake_all()
            return ready and listed.keys() == serving

    def _serving(self) -> list[Server]:
        return [server for server in self._servers.servers if server.state in ("up", "slow")]

    async def _listed(self) -> dict[str, dict[str, Any]]:
        reply = orjson.loads(await self._requests.ask(self._target, "GET", "/workers"))
        try:
            return {str(worker["url"]).rstrip("/"): worker for worker in reply["workers"]}
        except (KeyError, TypeError, AttributeError):
            raise ServerError(f"{self._target.url}/workers sent no list of workers") from None

    async def _watch(self) -> None:
        """Keep the list as it should be, and bring back a router that failed; waits end after the patience."""
        while True:
            try:
                await self._confirm()
                settled = await self.sync()
            except _ERRORS as failure:
                settled = False
                self._target.last_failure = str(failure) or type(failure).__name__
            unusable = self._gate.is_waiting and (self._target.state == "down" or self._blocked)
            reason = self._target.reason or self._target.last_failure or "it has no healthy server"
            if error := self._outage.watch(unusable, time.monotonic(), reason):
                self._gate.give_up(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SYNC_S if settled else SYNC_S):
                    await self._gate.servers_changed.wait()
            self._gate.servers_changed.clear()
