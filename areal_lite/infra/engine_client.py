"""Requests to inference servers: the one retry loop, failover, abort-and-continue, interruption, weight updates.

Runs on one event loop. A request that a server aborts, as a weight update does, continues from its tokens,
so one answer may mix policy versions; each token keeps the version its server reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from areal_lite.api import episode_context
from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.episode_context import Episode
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.errors import ConfigError, ContextOverflowError, ServerError
from areal_lite.infra.backends import dialect_of
from areal_lite.infra.backends.dialect import BadResponse, Chunk, ControlCall, ServerInfo
from areal_lite.infra.deadlines import Deadlines
from areal_lite.infra.server_pool import Server, ServerPool

logger = logging.getLogger(__name__)

RETRY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
MAX_FRUITLESS_ABORTS = 8
"""Aborts in a row without a new token before a request fails."""
MAX_BAD_RESPONSES = 2
INTERRUPT_GRACE_S = 2.0
"""Seconds a server has to return the tokens of interrupted calls."""
_JSON = {"Content-Type": "application/json"}


class _Request:
    """A request whose task is cancelled when the server stays silent too long."""

    __slots__ = ("task", "timed_out")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.timed_out = False

    def give_up(self) -> None:
        self.timed_out = True
        self.task.cancel()


class _Call:
    """A running call of ``generate``."""

    __slots__ = ("episode", "parked", "rid", "server")

    def __init__(self, rid: str, episode: Episode | None, server: Server | None) -> None:
        self.rid = rid
        self.episode = episode
        self.server = server
        """Server of its last request; before the first, the preferred server."""
        self.parked: asyncio.Event | None = None
        """Set once an interrupted call has kept its tokens."""

    @property
    def interrupted(self) -> bool:
        return self.episode is not None and self.episode.interrupted


class EngineClient:
    """A keep-alive client of all servers; ``open`` and ``close`` on the loop it is used on."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.pool = ServerPool(config.addresses)
        self.version = 0
        """The client's policy version; labels tokens only if a server does not."""
        self._config = config
        self._dialect = dialect_of(config.backend)
        self._session: aiohttp.ClientSession | None = None
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._holds = 0
        self._warned_no_version = False
        self._limits = ServerInfo()
        """Limits of all servers, if they or the tokenizer's folder state them."""
        self._silences: Deadlines[_Request] = Deadlines(config.request_timeout_s, _Request.give_up)
        self._calls: set[_Call] = set()

    async def open(self) -> None:
        """Open the session and ask every server what it serves.

        Raises:
            ServerError: If no server answers.
        """
        # uvicorn closes idle connections after 5 s and aiohttp does not retry a POST on a closed one.
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=self._config.max_connections_per_server,
            keepalive_timeout=4,
            ttl_dns_cache=300,
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, trust_env=False, read_bufsize=2**18, auto_decompress=False
        )
        failures = await asyncio.gather(*(self._ask_info(server) for server in self.pool.servers))
        if all(failures):
            raise ServerError(
                f"no inference server answers: {'; '.join(f for f in failures if f)}. Are they up, and does "
                "rollout.addresses name them?"
            )
        infos = [server.info for server in self.pool.servers]
        vocab_sizes = [_vocab_size(self._config.tokenizer_path), *(info.vocab_size for info in infos)]
        self._limits = ServerInfo(
            context_length=min((n.context_length for n in infos if n.context_length), default=None),
            vocab_size=min(filter(None, vocab_sizes), default=None),
        )

    async def close(self) -> None:
        """Close all connections; servers drop what they still generate for us."""
        self._silences.close()
        if self._session is not None:
            await self._session.close()

    def hold(self) -> None:
        """Send no generation until :meth:`release`; holds nest."""
        self._holds += 1
        self._may_send.clear()

    def release(self) -> None:
        """End one :meth:`hold`."""
        self._holds -= 1
        if self._holds == 0:
            self._may_send.set()

    # -- generation ----------------------------------------------------------------------------

    async def generate(self, req: ModelRequest) -> ModelResponse:
        """Return one complete answer; see ``InferenceEngine.agenerate``."""
        episode = episode_context.current().episode
        call = _Call(req.rid, episode, None if episode is None else episode.server)
        if episode is not None and episode.oldest_version is None:
            episode.oldest_version = self.version
        self._calls.add(call)
        try:
            response = await self._generate(req, call)
            if episode is not None:
                episode.server = call.server
                episode.calls.append(_own_copy(response))
            if call.interrupted:
                await self._park(call)
            return response
        finally:
            self._calls.discard(call)

    async def _generate(self, req: ModelRequest, call: _Call) -> ModelResponse:
        gconfig = req.gconfig
        seed = self._seed(call.episode) if gconfig.seed is None else gconfig.seed
        budget = self._budget(req)
        input_ids = list(req.input_ids)  # the caller may extend its list while the answer is sampled
        attempts = fruitless = 0
        started, clock = time.time(), time.monotonic()
        ttft = 0.0
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish = "abort"
        if call.episode is not None and (recorded := _recorded(call.episode, input_ids)) is not None:
            tokens += recorded.output_tokens
            logprobs += recorded.output_logprobs
            versions += recorded.output_versions
            finish = recorded.stop_reason
        while finish == "abort" and not call.interrupted:
            if len(tokens) >= budget:
                finish = "length"
                break
            body = self._dialect.generate_body(
                input_ids + tokens if tokens else input_ids,
                gconfig,
                rid=req.rid,
                max_new_tokens=budget - len(tokens),
                min_new_tokens=max(0, min(gconfig.min_new_tokens, budget) - len(tokens)),
                seed=seed,
            )
            chunk, tries = await self._send(orjson.dumps(body), call)
            ttft = ttft or time.monotonic() - clock
            attempts += tries
            tokens += chunk.tokens
            logprobs += chunk.logprobs
            versions += chunk.versions or ()
            finish = chunk.finish
            if finish == "abort" and len(tokens) < budget and not call.interrupted:
                fruitless = 0 if chunk.tokens else fruitless + 1
                if fruitless > MAX_FRUITLESS_ABORTS:
                    assert call.server is not None
                    raise ServerError(
                        f"{call.server.url} aborted request {req.rid} {fruitless} times in a row without a token"
                    )
                if fruitless:
                    await asyncio.sleep(random.uniform(0, min(1.0, 0.01 * 2**fruitless)))
        return ModelResponse(
            input_tokens=input_ids,
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            stop_reason=finish,
            latency=time.monotonic() - clock,
            ttft=ttft,
            started=started,
            attempts=attempts,
            rid=req.rid,
            tokenizer=req.tokenizer,
            metadata=req.metadata,
        )

    async def interrupt(self, episodes: Sequence[Episode]) -> None:
        """End the calls of these episodes and record the tokens they have sampled.

        The calls never return, so the caller must cancel the episodes next. If a server does not answer in
        time, the tokens of its calls are lost.
        """
        chosen = {id(episode) for episode in episodes}
        for episode in episodes:
            episode.interrupted = True
        calls = [call for call in self._calls if id(call.episode) in chosen]
        for call in calls:
            call.parked = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERRUPT_GRACE_S), asyncio.TaskGroup() as tasks:
                for call in calls:
                    tasks.create_task(self._abort(call))

    async def _abort(self, call: _Call) -> None:
        with contextlib.suppress(ServerError, aiohttp.ClientError, TimeoutError, OSError):
            if call.server is not None:
                await self._control(call.server, self._dialect.abort(call.rid))
        assert call.parked is not None
        await call.parked.wait()

    async def _park(self, call: _Call) -> None:
        if call.parked is not None:
            call.parked.set()
        await asyncio.Event().wait()  # until the cancellation that follows every interruption

    def _seed(self, episode: Episode | None) -> int | None:
        """Return the seed of the episode's next call, equal in every run with the same seed."""
        config = self._config
        if (
            episode is None
            or episode.seed_name is None
            or config.seed is None
            or config.backend != "embedded"
        ):
            return None
        name = f"{config.seed}/{episode.seed_name}/{episode.member_idx}/{episode.num_calls}"
        episode.num_calls += 1
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1

    def _budget(self, req: ModelRequest) -> int:
        """Return the maximum tokens of the answer; raises ConfigError for a request no server can serve."""
        ids, gconfig = req.input_ids, req.gconfig
        if gconfig.n_samples != 1:
            raise ConfigError(
                f"gconfig.n_samples is {gconfig.n_samples}: one request gives one answer; use gconfig.new(n_samples=1)"
            )
        if not ids:
            raise ConfigError("input_ids is empty: a prompt has at least one token")
        vocab_size = self._limits.vocab_size  # an id beyond it ends an SGLang server
        if set(map(type, ids)) != {int} or min(ids) < 0 or (vocab_size and max(ids) >= vocab_size):
            bad = next(i for i in ids if type(i) is not int or i < 0 or (vocab_size and i >= vocab_size))
            raise ConfigError(
                f"input_ids holds {bad!r}: ids are plain ints from 0 to below the vocabulary size"
                f"{'' if vocab_size is None else f' {vocab_size}'}; a tensor needs .tolist()"
            )
        window = min(gconfig.max_tokens, self._limits.context_length or gconfig.max_tokens)
        budget = min(gconfig.max_new_tokens, window - len(ids))
        if budget < 1:
            raise ContextOverflowError(
                f"the prompt has {len(ids)} tokens and the window {window}, so no token can be sampled: shorten the "
                "prompt, or raise gconfig.max_tokens or the server's context length"
            )
        return budget

    async def _send(self, body: bytes, call: _Call) -> tuple[Chunk, int]:
        """Return the first usable reply, from ``call.server``, and the number of tries."""
        failed: list[Server] = []
        last = "no server has the newest weights"
        bad_responses = 0
        for attempt in range(1, self._config.request_retries + 1):
            if self._holds:
                await self._may_send.wait()
            now = time.monotonic()
            server = self.pool.pick(now, preferred=call.server, avoid=failed)
            retry_after_s = 0.0
            if server is not None:
                call.server = server
                sent_version = self.version
                try:
                    status, reply, retry_after_s = await self._post(server, self._dialect.generate_path, body)
                    if status == 200:
                        chunk = self._dialect.parse_generate(orjson.loads(reply))
                        self._check_vocabulary(chunk)
                        self.pool.succeeded(server)
                        return self._labelled(chunk, server, sent_version), attempt
                    last = f"{server.url} said HTTP {status}: {_short(reply)}"
                    if status not in RETRY_STATUSES:
                        raise _refusal(status, last)
                    if status != 429:
                        self.pool.failed(server, now)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    last = f"{server.url} failed: {type(error).__name__}: {error}"
                    self.pool.failed(server, now)
                except (BadResponse, orjson.JSONDecodeError) as error:
                    last = f"{server.url} sent {error}"
                    self.pool.failed(server, now)
                    bad_responses += 1
                    if bad_responses > MAX_BAD_RESPONSES:
                        break
                failed.append(server)
            if attempt < self._config.request_retries:
                await asyncio.sleep(max(retry_after_s, random.uniform(0, min(5.0, 0.1 * 2**attempt))))
        raise ServerError(
            f"no usable answer in {attempt} tries; the last: {last}. Are the servers up, and does rollout.addresses "
            "name them?"
        )

    def _check_vocabulary(self, chunk: Chunk) -> None:
        vocab_size = self._limits.vocab_size
        if vocab_size and max(chunk.tokens, default=0) >= vocab_size:
            raise BadResponse(f"token {max(chunk.tokens)}, which is not in the vocabulary [0, {vocab_size})")

    def _labelled(self, chunk: Chunk, server: Server, sent_version: int) -> Chunk:
        if chunk.versions is not None or not chunk.tokens:  # vLLM reports none for an answer without tokens
            return chunk
        if not self._warned_no_version:
            self._warned_no_version = True
            logger.warning(
                "%s does not report the weight version of its tokens; they are labelled with the version at which the "
                "request was sent",
                server.url,
            )
        return Chunk(chunk.tokens, chunk.logprobs, [sent_version] * len(chunk.tokens), chunk.finish)

    async def _post(self, server: Server, path: str, body: bytes) -> tuple[int, bytes, float]:
        """Return status, body and the seconds of Retry-After."""
        assert self._session is not None, "open() first"
        request = _Request()
        self._silences.add(request)
        server.outstanding += 1
        try:
            async with self._session.post(
                server.url + path, data=body, headers=_JSON, allow_redirects=False
            ) as reply:
                after = "" if reply.status == 200 else reply.headers.get("Retry-After", "")
                return reply.status, await reply.read(), min(30.0, float(after)) if after.isdigit() else 0.0
        except asyncio.CancelledError:
            if request.timed_out and request.task.uncancel() == 0:
                raise TimeoutError(f"no answer in {self._config.request_timeout_s:g} s") from None
            raise
        finally:
            server.outstanding -= 1
            self._silences.discard(request)

    async def _ask_info(self, server: Server) -> str | None:
        """Record what the server reports about itself; return why it cannot be reached, or None."""
        assert self._session is not None
        last = ""
        for attempt in range(self._config.request_retries):
            try:
                async with self._session.get(
                    server.url + self._dialect.info_path, allow_redirects=False
                ) as reply:
                    body = await reply.read()
                    if reply.status == 200:
                        server.info = self._dialect.parse_info(orjson.loads(body))
                    return None
            except orjson.JSONDecodeError:
                return None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                last = f"{server.url}: {error}"
                await asyncio.sleep(random.uniform(0, 0.2 * 2**attempt))
        return last

    # -- weights -------------------------------------------------------------------------------

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every server load the checkpoint folder at ``path`` as ``version``.

        Running requests are aborted and continue from their tokens under the new weights. A server
        that fails gets no more requests until a later update succeeds on it.

        Raises:
            ServerError: If the update failed on all servers.
        """
        self.hold()
        try:
            errors = await asyncio.gather(
                *(self._update_one(server, path, version) for server in self.pool.servers)
            )
        finally:
            self.release()
        if all(errors):  # none is behind another, so all keep serving the weights they have
            raise ServerError(f"no server took policy version {version} from {path}: {errors[0]}")
        for server, error in zip(self.pool.servers, errors, strict=True):
            server.behind = error
            if error is not None:
                logger.error(
                    "%s failed to load version %d and gets no requests: %s", server.url, version, error
                )

    async def _update_one(self, server: Server, path: str, version: int) -> str | None:
        try:
            await self._control(server, self._dialect.pause())
            try:
                for call in self._dialect.update_weights(path, version):
                    await self._control(server, call)
            finally:
                await self._control(server, self._dialect.resume())
        except (ServerError, aiohttp.ClientError, TimeoutError, OSError) as error:
            return str(error) or repr(error)
        return None

    async def _control(self, server: Server, call: ControlCall) -> None:
        status, reply, _ = await self._post(server, call.path, orjson.dumps(call.body))
        if status != 200:
            raise ServerError(f"{server.url}{call.path} said HTTP {status}: {_short(reply)}")
        try:
            error = self._dialect.update_error(orjson.loads(reply))
        except orjson.JSONDecodeError:
            return
        if error is not None:
            raise ServerError(f"{server.url}{call.path}: {error}")


def _own_copy(response: ModelResponse) -> ModelResponse:
    """Return a copy for the record: a workflow may build its next prompt in the answer's lists."""
    return replace(
        response,
        input_tokens=response.input_tokens.copy(),
        output_tokens=response.output_tokens.copy(),
        output_logprobs=response.output_logprobs.copy(),
        output_versions=response.output_versions.copy(),
    )


def _recorded(episode: Episode, input_ids: list[int]) -> ModelResponse | None:
    """Take the answer that an earlier run of the episode got to this prompt."""
    if not episode.recorded:
        return None
    answers = episode.recorded.get(tuple(input_ids))
    return answers.pop(0) if answers else None


def _vocab_size(folder: str | None) -> int | None:
    """Return the vocabulary size in the config.json of a model folder; None without one."""
    try:
        config = orjson.loads((Path(folder or "") / "config.json").read_bytes())
        size = config.get("text_config", config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def _refusal(status: int, message: str) -> Exception:
    if status in (400, 413, 422):
        return ConfigError(f"{message}. The request breaks a rule of the server, so it is not sent again")
    return ServerError(message)


def _short(reply: bytes) -> Any:
    return reply[:500].decode(errors="replace")
