"""Answers from inference servers: the one retry loop, failover, abort-and-continue, interruption.

Runs on one event loop. A request that a server aborts, as a weight update does, continues from its tokens,
so one answer may mix policy versions; each token keeps the version its server reported. A stream whose connection
breaks continues likewise, and its receiver gets each token once.

A constrained answer (``json_schema``, ``regex``, ``ebnf``) continues only on the embedded server, because others would
begin the constraint anew. Elsewhere it stays on the server during weight updates, and an abort starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import orjson

from areal_lite.api import episode_context
from areal_lite.api.episode_context import Episode
from areal_lite.api.io_struct import ModelRequest, ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.config.rules import check_engine
from areal_lite.errors import ConfigError, ContextOverflowError, ServerError
from areal_lite.servers.client.model_identity import ModelIdentity
from areal_lite.servers.client.server_requests import REQUEST_ERRORS, ServerRequests, SilentServerError
from areal_lite.servers.dialects import dialect_of
from areal_lite.servers.dialects.dialect import BadResponse, Chunk, ErrorReply, TopLogprobs
from areal_lite.servers.dialects.token_stream import Receiver, ReceiverError, TokenStream
from areal_lite.servers.pool.reconciler import Reconciler
from areal_lite.servers.pool.server_pool import Server, ServerPool
from areal_lite.servers.pool.sglang_router import AFFINITY_HEADER, Router
from areal_lite.servers.weights.published_weights import PublishedWeights

THIS_SERVER = frozenset({401, 403, 404, 405})
"""Statuses of a server that is not what it should be; another may serve the request."""
AWAY = frozenset({429, 502, 503, 504})
"""Statuses of a server that has not looked at the request, which do not count as tries."""
RETRY_STATUSES = THIS_SERVER | AWAY | {408, 500}
SEND_ERRORS = (ErrorReply, *REQUEST_ERRORS, BadResponse, orjson.JSONDecodeError)
MAX_FRUITLESS_ABORTS = 8
"""Aborts in a row without a new token before a request fails."""
MAX_BAD_RESPONSES = 2
MAX_BRANCHES = 8
"""Latest answers of an episode that a prompt may extend to share their ids."""
INTERRUPT_GRACE_S = 2.0
"""Seconds a server has to return the tokens of interrupted calls."""


class OutdatedReplyError(Exception):
    """A server answered with older weights than it acknowledged, or lacks its adapter."""


class _Call:
    """A running call of ``generate``, and the tokens of its answer so far."""

    __slots__ = (
        "broken_streams",
        "episode",
        "first_token_at",
        "logprobs",
        "must_stay",
        "on_tokens",
        "parked",
        "rid",
        "server",
        "tokens",
        "top_logprobs",
        "versions",
    )

    def __init__(self, req: ModelRequest, episode: Episode | None, *, must_stay: bool) -> None:
        self.rid = req.rid
        self.on_tokens: Receiver | None = req.on_tokens
        self.episode = episode
        self.must_stay = must_stay
        """Whether its answer cannot be continued on the server that has it."""
        self.server = None if episode is None else episode.server
        """Server of its last request; before the first, the preferred server."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_logprobs: TopLogprobs = []
        self.first_token_at = 0.0
        """Monotonic time of the first token passed on."""
        self.broken_streams = 0
        self.parked: asyncio.Event | None = None
        """Set once an interrupted call has kept its tokens."""

    @property
    def interrupted(self) -> bool:
        return self.episode is not None and self.episode.interrupted

    def receive(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.first_token_at = self.first_token_at or time.monotonic()
        assert self.on_tokens is not None
        self.on_tokens(tokens, logprobs)

    def resume(self, recorded: ModelResponse, num_top: int) -> str:
        """Begin with a recorded answer, if it has all that is asked for; return its stop reason."""
        if num_top and len(recorded.output_top_logprobs) != len(recorded.output_tokens):
            return "abort"
        self.tokens += recorded.output_tokens
        self.logprobs += recorded.output_logprobs
        self.versions += recorded.output_versions
        self.top_logprobs += recorded.output_top_logprobs
        if self.on_tokens is not None and self.tokens:
            self.receive(recorded.output_tokens, recorded.output_logprobs)
        return recorded.stop_reason

    def extend(self, chunk: Chunk) -> None:
        if not self.tokens:  # the usual answer is one reply, whose lists nobody else holds
            self.tokens, self.logprobs, self.versions = chunk.tokens, chunk.logprobs, chunk.versions or []
            self.top_logprobs = chunk.top_logprobs
            return
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions or ()
        self.top_logprobs += chunk.top_logprobs

    def restart(self) -> None:
        """Forget an aborted constrained answer: the server would begin the constraint anew after its tokens.

        Raises:
            ServerError: If its tokens were passed on.
        """
        if self.on_tokens is not None and self.tokens:
            assert self.server is not None
            raise ServerError(
                f"{self.server.url} aborted request {self.rid}, a streamed answer under a schema, regex or grammar, "
                "which it cannot continue. Send it without on_tokens, or use the embedded server"
            )
        self.tokens, self.logprobs, self.versions, self.top_logprobs = [], [], [], []


class EngineClient:
    """A client of all servers; ``open`` and ``close`` on the loop it is used on."""

    def __init__(
        self,
        config: InferenceEngineConfig,
        *,
        identity: ModelIdentity | None = None,
        on_outage: Callable[[ServerError], None] | None = None,
    ) -> None:
        """Start unconnected.

        Args:
            config: Addresses and limits.
            identity: The run's model, which servers are compared with.
            on_outage: Called when no server has been healthy for ``outage_patience_s``.
        """
        check_engine(config)
        self.pool = ServerPool(config.addresses)
        self.version = 0
        """The client's policy version; labels tokens only if a server does not."""
        self.retried = 0
        """Requests that took more than one try."""
        self._config = config
        self._dialect = dialect_of(config.backend)
        self._requests = ServerRequests(config, self._dialect)
        self._reconciler = Reconciler(
            config,
            self.pool,
            self._requests,
            self._dialect,
            must_stay=self._must_stay,
            on_change=self._on_change,
            on_pause=self._hold_for_update,
            is_waiting=self._is_waiting,
            on_outage=self.give_up,
            identity=identity,
        )
        self._router: Router | None = None
        if config.router is not None:
            self._router = Router(
                config,
                self.pool,
                self._requests,
                self._reconciler,
                on_change=self._wake_all,
                is_waiting=self._is_waiting,
                on_outage=self.give_up,
            )
        self._targets = self.pool if self._router is None else self._router.pool
        """Where generations are sent."""
        self._on_outage = on_outage
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Requests that no server takes now, the oldest first."""
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._holds = 0
        self._held_for_update = False
        self._calls: set[_Call] = set()

    async def open(self) -> None:
        """Open the connections and compare every server with what the run wants; see :class:`Reconciler`.

        Raises:
            ServerError: If no server answers.
            ConfigError: If one speaks another protocol or serves another model.
        """
        self._requests.open()
        await self._reconciler.open()
        if self._router is not None:
            await self._router.open()

    async def close(self) -> None:
        """Close all connections; servers drop what they still generate for us."""
        if self._router is not None:
            await self._router.close()
        await self._reconciler.close()
        await self._requests.close()

    def give_up(self, error: ServerError) -> None:
        """Fail all requests that wait for a server, and report the end of patience."""
        if self._on_outage is not None:
            self._on_outage(error)
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():
                waiter.set_exception(ServerError(str(error)))

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Have the servers load ``weights``; see :class:`Reconciler`. No generation is sent once a server pauses."""
        try:
            await self._reconciler.update_weights(weights)
            if self._router is not None:
                await self._router.update(weights.version)
        finally:
            if self._held_for_update:
                self._held_for_update = False
                self.release()
            self._wake_all()

    def _hold_for_update(self) -> None:
        if not self._held_for_update:
            self._held_for_update = True
            self.hold()

    async def probe(self, input_ids: list[int], num_tokens: int) -> list[tuple[str, list[int], list[float]]]:
        """Return the greedy answer of each server that is up to one prompt: URL, tokens, log-probs.

        Raises:
            ServerError: If none answers.
        """
        gconfig = GenerationHyperparameters(greedy=True, max_new_tokens=num_tokens, ignore_eos=True)

        async def ask(server: Server) -> tuple[str, list[int], list[float]] | None:
            request = ModelRequest(input_ids=input_ids, gconfig=gconfig)
            body = self._dialect.generate_body(
                input_ids, gconfig, rid=request.rid, max_new_tokens=num_tokens, min_new_tokens=0, seed=None
            )
            try:
                chunk = await self._requests.generate(
                    server,
                    self._addressed(body, server),
                    None,
                    version=self.version,
                    top_logprobs=0,
                    max_tokens=num_tokens,
                )
            except SEND_ERRORS as error:
                self._reconciler.failed(server, _reason(error))
                return None
            return (server.url, chunk.tokens, chunk.logprobs) if chunk.tokens else None

        answers = await asyncio.gather(*(ask(server) for server in self.pool.servers if server.usable))
        if not (found := [answer for answer in answers if answer is not None]):
            raise ServerError(f"no server answers: {self.pool.servers[0].last_failure or 'all are down'}")
        return found

    def _must_stay(self, server: Server) -> bool:
        target = server if self._router is None else self._targets.servers[0]
        return target.staying > 0

    def _is_waiting(self) -> bool:
        return bool(self._calls) and not self._holds

    def _on_change(self, server: Server) -> None:
        if self._router is not None:
            self._router.refresh()
        else:
            self._wake_for(server)

    def metrics(self) -> dict[str, float]:
        """Return the figures of each server as ``INDEX/NAME``, and of the router as ``router/NAME``."""
        figures = self.pool.metrics()
        if self._router is not None:
            figures |= {f"router/{name}": value for name, value in self._targets.servers[0].metrics().items()}
        return figures

    @property
    def generated_tokens(self) -> int:
        """Tokens that servers answered with so far."""
        return sum(server.tokens for server in self._targets.servers)

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
        call = _Call(
            req,
            episode,
            must_stay=req.gconfig.is_constrained and not self._dialect.continues_constraints,
        )
        if episode is not None and episode.oldest_version is None:
            episode.oldest_version = self.version
        prefix = req.prefix or continued(req.input_ids, episode)
        self._calls.add(call)
        try:
            response = await self._generate(req, prefix, call)
            if episode is not None:
                episode.server = call.server
                episode.calls.append(own_copy(response, prefix))
            if call.interrupted:
                await self._park(call)
            return response
        finally:
            self._calls.discard(call)

    async def _generate(self, req: ModelRequest, prefix: TokenPrefix, call: _Call) -> ModelResponse:
        gconfig = req.gconfig
        seed = self._seed(call.episode) if gconfig.seed is None else gconfig.seed
        budget = self._budget(req, prefix.num_accepted)
        # Without a prefix of its own, the caller may extend its list while the answer is sampled.
        input_ids = prefix.tolist() if req.prefix is None else req.input_ids
        attempts = fruitless = 0
        started, clock = time.time(), time.monotonic()
        ttft = 0.0
        finish = "abort"
        recorded = None if call.episode is None else _recorded(call.episode, input_ids)
        if recorded is not None and not (call.must_stay and recorded.stop_reason == "abort"):
            finish = call.resume(recorded, req.top_logprobs)
        while finish == "abort" and not call.interrupted:
            num_tokens = len(call.tokens)
            if num_tokens >= budget:
                finish = "length"
                break
            body = self._dialect.generate_body(
                input_ids + call.tokens if num_tokens else input_ids,
                gconfig,
                rid=req.rid,
                max_new_tokens=budget - num_tokens,
                min_new_tokens=max(0, min(gconfig.min_new_tokens, budget) - num_tokens),
                seed=seed,
                num_continued=num_tokens,
                top_logprobs=req.top_logprobs,
                stream=req.on_tokens is not None,
            )
            if self._router is not None:
                self._router.check_fields(body)
            chunk, tries = await self._send(
                body, call, req.top_logprobs, len(input_ids) + num_tokens, budget - num_tokens
            )
            ttft = ttft or (call.first_token_at or time.monotonic()) - clock
            attempts += tries
            call.extend(chunk)
            finish = chunk.finish
            if finish == "abort" and len(call.tokens) < budget and not call.interrupted:
                if call.must_stay:
                    call.restart()
                fruitless = 0 if call.tokens and chunk.tokens else fruitless + 1
                if fruitless:
                    await self._wait_after_abort(call, fruitless)
        return ModelResponse(
            input_tokens=input_ids,
            output_tokens=call.tokens,
            output_logprobs=call.logprobs,
            output_versions=call.versions,
            output_top_logprobs=call.top_logprobs,
            stop_reason=finish,
            latency=time.monotonic() - clock,
            ttft=ttft,
            started=started,
            attempts=attempts,
            rid=req.rid,
            server=call.server.url if attempts and call.server is not None else "",
            tokenizer=req.tokenizer,
            metadata=req.metadata,
        )

    async def _wait_after_abort(self, call: _Call, fruitless: int) -> None:
        if fruitless > MAX_FRUITLESS_ABORTS:
            assert call.server is not None
            raise ServerError(
                f"{call.server.url} aborted request {call.rid} {fruitless} times in a row without a token"
            )
        await asyncio.sleep(random.uniform(0, min(1.0, 0.01 * 2**fruitless)))

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
        self._wake_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERRUPT_GRACE_S), asyncio.TaskGroup() as tasks:
                for call in calls:
                    tasks.create_task(self._abort(call))

    async def _abort(self, call: _Call) -> None:
        if call.server is not None:
            for server in [call.server] if self._router is None else self.pool.servers:
                with contextlib.suppress(ServerError, *REQUEST_ERRORS):
                    await self._requests.control(server, self._dialect.abort(call.rid))
        assert call.parked is not None
        await call.parked.wait()

    async def _park(self, call: _Call) -> None:
        if call.parked is not None:
            call.parked.set()
        await asyncio.Event().wait()  # until the cancellation that follows every interruption

    def _seed(self, episode: Episode | None) -> int | None:
        """Return the seed of the episode's next call, equal in every run with the same seed."""
        config = self._config
        if episode is None or episode.seed_name is None or config.seed is None or config.backend != "embedded":
            return None
        name = f"{config.seed}/{episode.seed_name}/{episode.member_idx}/{episode.num_calls}"
        episode.num_calls += 1
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1

    def _budget(self, req: ModelRequest, num_accepted: int) -> int:
        """Return the maximum tokens of the answer; raises ConfigError for a request no server can serve."""
        ids, gconfig = req.input_ids, req.gconfig
        if gconfig.n_samples != 1:
            raise ConfigError(
                f"gconfig.n_samples is {gconfig.n_samples}: one request gives one answer; use gconfig.new(n_samples=1)"
            )
        if req.top_logprobs < 0:
            raise ConfigError(f"top_logprobs is {req.top_logprobs}: it is a number of tokens, 0 for none")
        if not ids:
            raise ConfigError("input_ids is empty: a prompt has at least one token")
        vocab_size = self._requests.limits.vocab_size  # an id beyond it ends an SGLang server
        new = ids[num_accepted:]
        if set(map(type, new)) - {int} or min(new, default=0) < 0 or (vocab_size and max(new, default=0) >= vocab_size):
            bad = next(i for i in new if type(i) is not int or i < 0 or (vocab_size and i >= vocab_size))
            raise ConfigError(
                f"input_ids holds {bad!r}: ids are plain ints from 0 to below the vocabulary size"
                f"{'' if vocab_size is None else f' {vocab_size}'}; a tensor needs .tolist()"
            )
        window = min(gconfig.max_tokens, self._requests.limits.context_length or gconfig.max_tokens)
        budget = min(gconfig.max_new_tokens, window - len(ids))
        if budget < 1:
            raise ContextOverflowError(
                f"the prompt has {len(ids)} tokens and the window {window}, so no token can be sampled: shorten the "
                "prompt, or raise gconfig.max_tokens or the server's context length"
            )
        return budget

    async def _send(
        self, body: dict[str, Any], call: _Call, top_logprobs: int, num_prompt: int, max_tokens: int
    ) -> tuple[Chunk, int]:
        """Return the first usable reply, from ``call.server``, and how often it was sent.

        Waits while no server takes requests. Only servers that answered count as tries. The reply of a stream that
        broke after its first token has the tokens that arrived and is "aborted".
        """
        pool, size = self._targets, num_prompt + max_tokens
        failures: _Failures | None = None
        sends = 0
        while True:
            if self._holds:
                await self._may_send.wait()
            server = pool.pick(preferred=call.server, avoid=() if failures is None else failures.servers)
            if server is None:
                await self._until_usable()
                if call.interrupted:
                    return Chunk([], [], [], "abort"), sends
                continue
            call.server = server
            sends += 1
            acknowledged, adapter = server.version, server.adapter
            stream = None if call.on_tokens is None else self._stream(call, top_logprobs, max_tokens)
            sent = time.monotonic()
            pool.start(server, size, sent, adapter=adapter, stays=call.must_stay)
            try:
                chunk = await self._requests.generate(
                    server,
                    self._addressed(body, server),
                    stream,
                    version=self.version,
                    top_logprobs=top_logprobs,
                    max_tokens=max_tokens,
                    headers=self._affinity(call),
                    newest=self._newest_version,
                )
                chunk = self._labelled(chunk, adapter, acknowledged)
                if acknowledged is None or not chunk.versions or chunk.versions[-1] >= acknowledged:
                    now = time.monotonic()
                    pool.succeeded(server, len(chunk.tokens), now - sent, now)
                    self.retried += sends > 1
                    return chunk, sends
                reason = f"it acknowledged version {acknowledged} and sent tokens of version {chunk.versions[-1]}"
                if self._router is None:
                    self._reconciler.behind(server, reason)
                elif stream is not None:
                    await self._router.examine()
                if stream is not None:
                    return chunk, sends
                error: Exception = OutdatedReplyError(f"{server.url}: {reason}")
            except ReceiverError as raised:
                assert raised.__cause__ is not None
                raise raised.__cause__ from None
            except SEND_ERRORS as raised:
                error = self._after_lost_adapter(raised, server, adapter)
            finally:
                pool.end(server, size, adapter=adapter, stays=call.must_stay)
                if self._waiting:
                    self._wake_for(server)
            failures = failures or _Failures(self._config.request_retries)
            if self._router is None or not _may_be_old_or_dead(error) or not await self._router.examine():
                self._record_failure(server, error, sent)
            failures.record(server, error)
            if stream is not None and len(stream):
                await self._count_break(call, failures.last)
                return self._labelled(stream.chunk(), adapter, acknowledged), sends
            failures.check()
            await asyncio.sleep(failures.pause_s(sends))

    def _addressed(self, body: dict[str, Any], server: Server) -> bytes:
        """Return the body as JSON, with the adapter that the server has."""
        return orjson.dumps(body if server.adapter is None else body | self._dialect.name_adapter(server.adapter))

    def _labelled(self, chunk: Chunk, adapter: str | None, version: int | None) -> Chunk:
        """Label tokens with the version of the adapter that their request kept; the server may have newer ones too."""
        if adapter is None or version is None or not self._dialect.keeps_adapter:
            return chunk
        return replace(chunk, versions=[version] * len(chunk.tokens))

    def _after_lost_adapter(self, error: Exception, server: Server, adapter: str | None) -> Exception:
        """Return the error, as an outdated reply if it says that the server lacks the adapter; it gets it again."""
        if not isinstance(error, ErrorReply) or adapter is None or adapter not in error.message:
            return error
        if server.adapter == adapter:  # else it has a newer one
            self._reconciler.behind(server, "it no longer has its adapter")
        return OutdatedReplyError(f"{server.url}: {error.message}")

    def _affinity(self, call: _Call) -> dict[str, str] | None:
        """Return the header that makes the router send an episode's requests to one server."""
        if self._router is None or call.episode is None:
            return None
        return {AFFINITY_HEADER: f"{id(self):x}-{id(call.episode):x}"}

    def _record_failure(self, server: Server, error: Exception, sent: float) -> None:
        """Update the state of the server that failed a request."""
        reason, keeper = _reason(error), self._router or self._reconciler
        if isinstance(error, OutdatedReplyError):
            return
        if not isinstance(error, ErrorReply):
            server.bad_replies += isinstance(error, BadResponse | orjson.JSONDecodeError)
            keeper.failed(server, reason, at_once=isinstance(error, SilentServerError))
        elif error.status == 429:
            self.pool.throttled(server, reason, sent=sent, now=time.monotonic())
            if error.retry_after_s:
                self.pool.wait(server, 1)
                asyncio.get_running_loop().call_later(error.retry_after_s, self._end_wait, server)
        elif error.status in RETRY_STATUSES:
            keeper.failed(server, reason, at_once=error.status in THIS_SERVER)

    def _end_wait(self, server: Server) -> None:
        self.pool.wait(server, -1)
        self._wake_for(server)

    async def _until_usable(self) -> None:
        """Wait until a server may take a request.

        Raises:
            ServerError: If none has been healthy for ``outage_patience_s``.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # woken and cancelled at once: wake another
                self._wake_one()
            raise

    def _wake_one(self) -> None:
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():
                waiter.set_result(None)
                return

    def _wake_for(self, server: Server) -> None:
        """Wake as many requests as the server has places."""
        for _ in range(int(min(len(self._waiting), max(0, server.capacity - server.outstanding)))):
            self._wake_one()

    def _wake_all(self) -> None:
        for _ in range(len(self._waiting)):
            self._wake_one()

    def _newest_version(self) -> int | None:
        return self._reconciler.newest

    def _stream(self, call: _Call, top_logprobs: int, max_tokens: int) -> TokenStream:
        return TokenStream(
            self._dialect,
            call.receive,
            version=self.version,
            vocab_size=self._requests.limits.vocab_size,
            top_logprobs=top_logprobs,
            max_tokens=max_tokens,
            newest=self._newest_version,
        )

    async def _count_break(self, call: _Call, last: str) -> None:
        call.broken_streams += 1
        if call.broken_streams >= self._config.request_retries:
            raise ServerError(f"the stream of request {call.rid} broke {call.broken_streams} times; the last: {last}")
        await asyncio.sleep(random.uniform(0, min(5.0, 0.1 * 2**call.broken_streams)))


def continued(ids: list[int], episode: Episode | None) -> TokenPrefix:
    """Return a prompt; if it extends one of the episode's latest answers, it shares that one's ids."""
    if episode is not None and isinstance(ids, list):
        for call in reversed(episode.calls[-MAX_BRANCHES:]):
            before, end = call.prompt, call.input_len + call.output_len
            if ids[before.length : end] == call.output_tokens and ids[: before.length] == before.tolist():
                return before.extended(ids[before.length :])
    return TokenPrefix(list(ids), len(ids))


def own_copy(response: ModelResponse, prefix: TokenPrefix) -> ModelResponse:
    """Return a copy for the record: a workflow may build its next prompt in the answer's lists, not in ``prefix``."""
    copy = replace(
        response,
        input_tokens=[],
        output_tokens=response.output_tokens.copy(),
        output_logprobs=response.output_logprobs.copy(),
        output_versions=response.output_versions.copy(),
        output_top_logprobs=response.output_top_logprobs.copy(),
    )
    return SharedPromptResponse.of(copy, prefix)


def _recorded(episode: Episode, input_ids: list[int]) -> ModelResponse | None:
    """Take the answer that an earlier run of the episode got to this prompt."""
    answers = episode.recorded.get(len(input_ids), [])
    for place, answer in enumerate(answers):
        if answer.prompt.tolist() == input_ids:
            return answers.pop(place)
    return None


def _may_be_old_or_dead(error: Exception) -> bool:
    """Return whether a server behind the router may be the cause."""
    return not isinstance(error, ErrorReply) or error.status in RETRY_STATUSES - {429}


def _reason(error: Exception) -> str:
    if isinstance(error, ErrorReply):
        return f"said HTTP {error.status}: {error.message}"
    if isinstance(error, BadResponse | orjson.JSONDecodeError):
        return f"sent {error}"
    return f"failed: {type(error).__name__}: {error}"


class _Failures:
    """The failed tries of one request."""

    def __init__(self, max_tries: int) -> None:
        self._max_tries = max_tries
        self.servers: list[Server] = []
        """Those to avoid."""
        self.last = ""
        self._tries = self._bad_replies = 0

    def record(self, server: Server, error: Exception) -> None:
        """Count a failure, as a try if the server has looked at the request; raise a refusal of the request."""
        self.last = f"{server.url} {_reason(error)}"
        if server not in self.servers:
            self.servers.append(server)
        if isinstance(error, ErrorReply) and error.status not in RETRY_STATUSES:
            raise _refusal(error.status, self.last) from None
        self._bad_replies += isinstance(error, BadResponse | orjson.JSONDecodeError)
        away = isinstance(error, OutdatedReplyError | SilentServerError | aiohttp.ClientConnectorError) or (
            isinstance(error, ErrorReply) and error.status in AWAY
        )
        self._tries += not away

    def check(self) -> None:
        """Raise ServerError if the request must not be sent again."""
        if self._tries >= self._max_tries or self._bad_replies > MAX_BAD_RESPONSES:
            raise ServerError(
                f"no usable answer in {self._tries} tries; the last: {self.last}. Are the servers up, and does "
                "rollout.addresses name them?"
            )

    def pause_s(self, sends: int) -> float:
        """Return how long to wait before the next try."""
        return random.uniform(0, min(5.0, 0.1 * 2 ** min(sends, 6)))


def _refusal(status: int, message: str) -> Exception:
    if status in (400, 413, 422):
        return ConfigError(f"{message}. The request breaks a rule of the server, so it is not sent again")
    return ServerError(message)
