"""One generation call to one usable reply: the choice of the server, retries, failover. The one retry loop.

Guarantees that a reply comes from a server which had acknowledged the newest version when the request was sent, and
serves no older one; and that what a stream passed on before it broke is in the reply, so it is never asked for again.

Only a server that looked at the request uses up one of its tries. A server that is away, silent or throttled says
nothing about the request, and waiting for it is bounded by ``outage_patience_s`` for all requests together; counting
these would fail whole batches in the second in which a server restarts.
"""

import asyncio
import random
import time
import uuid
from dataclasses import replace
from typing import Any
import aiohttp
import orjson
from areal_lite.errors import ConfigError, ServerError
from areal_lite.servers.client.answer import Answer
from areal_lite.servers.client.server_requests import REQUEST_ERRORS, SilentServerError, message_of
from areal_lite.servers.dialects.dialect import BadResponse, Chunk, ErrorReply, GenerationCall
from areal_lite.servers.dialects.reply_reader import ReceiverError, ReplyReader
from areal_lite.servers.pool.reconciler import Reconciler
from areal_lite.servers.pool.request_gate import Servers
from areal_lite.servers.pool.server_pool import Server
from areal_lite.servers.pool.sglang_router import AFFINITY_HEADER, Router

THIS_SERVER = frozenset({401, 403, 404, 405})  # of a server that is not as it should be; another may serve the request
AWAY = frozenset({429, 502, 503, 504})  # of a server that has not looked at the request, which do not count as tries
RETRY_STATUSES = THIS_SERVER | AWAY | {408, 500}
SEND_ERRORS = (ErrorReply, BadResponse, *REQUEST_ERRORS)
MAX_BAD_RESPONSES = 2
MAX_FEATURES_REPLY = 2**29  # bytes of the longest reply with features of images, which are floats in base64


class OutdatedReplyError(Exception):
    """A server answered with older weights than it acknowledged, or lacks its adapter."""


class OtherModelError(BadResponse):
    """A server answered with another model than it reported: it gets no requests until its model is compared again."""


class RequestSender:
    """Sends generation calls to the servers of the gate's pool."""

    def __init__(self, servers: Servers, reconciler: Reconciler, router: Router | None) -> None:
        self._max_tries = servers.config.request_retries
        self._requests, self._gate = servers.requests, servers.gate
        self._reconciler = reconciler
        self._router = router
        self.retried = 0

    async def send(self, call: GenerationCall, answer: Answer) -> tuple[Chunk, int]:
        """Return the first usable reply, from ``answer.server`` if it can, and how often the call was sent. Waits while
        no server takes requests. A stream that broke after its first token is "aborted", with the tokens so far."""
        body = self._requests.dialect.generate_body(call)
        if self._router is not None:
            self._router.check_fields(body)
        with_affinity = self._router is not None and answer.episode is not None
        headers = {AFFINITY_HEADER: f"{id(self):x}-{id(answer.episode):x}"} if with_affinity else None
        pool, size = self._gate.pool, len(call.input_ids) + call.max_new_tokens
        failures = Failures(self._max_tries)
        sends = 0
        while True:
            while self._gate.holders and not answer.ends_early:
                await self._gate.released.wait()
            if answer.ends_early:
                return Chunk([], [], [], "abort"), sends
            server = pool.pick(preferred=answer.server, avoid=failures.servers)
            if server is None:
                await self._gate.until_usable()
                continue
            answer.server = server
            sends += 1
            # The reply is judged by what the server had acknowledged when it got the request. By the time the reply
            # is here, an update may have raised both, and tokens of the version before would look outdated.
            acknowledged, adapter = server.version, server.adapter
            reader = self._requests.reader(call, answer.receive if call.stream else None)
            sent = time.monotonic()
            pool.start(server, size, sent, adapter=adapter, stays=answer.must_stay)
            try:
                chunk = await self.send_once(call, body, server, reader, headers=headers)
                if (model := adapter or server.info.name) and reader.model not in (None, model):
                    raise OtherModelError(f"an answer of {reader.model!r:.80}, but it served {model!r}")
                chunk = self._labelled(chunk, adapter, acknowledged)
                oldest = min(chunk.versions or (), default=acknowledged)
                if acknowledged is None or oldest is None or oldest >= acknowledged:
                    now = time.monotonic()
                    pool.succeeded(server, len(chunk.tokens), now - sent, now)
                    self.retried += sends > 1
                    return chunk, sends
                reason = f"it acknowledged version {acknowledged} and sent tokens of version {oldest}"
                if self._router is None:
                    self._reconciler.behind(server, reason)
                elif call.stream:
                    await self._router.examine()
                if call.stream:  # its tokens were passed on, so they stay, with the versions that they have
                    return chunk, sends
                error: Exception = OutdatedReplyError(f"{server.url}: {reason}")
            except ReceiverError as raised:
                assert raised.__cause__ is not None
                raise raised.__cause__ from None
            except SEND_ERRORS as raised:
                # A traceback would hold this frame, which holds the error: a cycle with the request and its episode.
                error = self._after_lost_adapter(raised, server, adapter).with_traceback(None)
            finally:
                pool.end(server, size, adapter=adapter, stays=answer.must_stay)
                self._gate.wake_for(server)
            # A router hides which server failed. If an examination finds one that should not have answered, the
            # router itself is not at fault.
            suspect = not isinstance(error, ErrorReply) or error.status in RETRY_STATUSES - {429}
            if self._router is None or not suspect or not await self._router.examine():
                self._record_failure(server, error, sent)
            failures.record(server, error)
            answer.rid = uuid.uuid4().hex  # the server may still run what has the other name, and refuse it
            if call.stream and len(reader):
                await self._count_break(answer, failures.last)
                return self._labelled(reader.chunk(), adapter, acknowledged), sends
            failures.check()
            await asyncio.sleep(pause_s(sends))
            call = replace(call, rid=answer.rid)
            body = self._requests.dialect.generate_body(call)

    async def send_once(
        self,
        call: GenerationCall,
        body: dict[str, Any],
        server: Server,
        reader: ReplyReader,
        headers: dict[str, str] | None = None,
    ) -> Chunk:
        """Send a call, with what the server makes of its images; raises one of ``SEND_ERRORS``."""
        dialect = self._requests.dialect
        if server.adapter is not None:  # before it waits: the caller has read which one
            body = body | {dialect.adapter_key: server.adapter}
        if (images := dialect.images_call(call)) is not None:
            status, reply = await self._requests.exchange(
                server, images.path, method="POST", body=images.body, max_bytes=MAX_FEATURES_REPLY
            )
            if status != 200:
                raise ErrorReply(status, message_of(reply))
            try:
                body = dialect.with_features(body, call, orjson.loads(reply))
            except orjson.JSONDecodeError as error:
                raise BadResponse(f"a reply of {images.path} that is not JSON ({error})") from None
        return await self._requests.generate(server, orjson.dumps(body), reader, headers=headers)

    def _labelled(self, chunk: Chunk, adapter: str | None, version: int | None) -> Chunk:
        """Label tokens with the version of the adapter that their request kept; the server may have newer ones too."""
        if adapter is None or version is None or not self._requests.dialect.keeps_adapter:
            return chunk
        return replace(chunk, versions=[version] * len(chunk.tokens))

    def _after_lost_adapter(self, error: Exception, server: Server, adapter: str | None) -> Exception:
        """Return the error, as an outdated reply if it says that the server lacks the adapter; it gets it again."""
        if not isinstance(error, ErrorReply) or adapter is None or adapter not in error.message:
            return error
        if server.adapter == adapter:  # else it has a newer one
            self._reconciler.behind(server, "it no longer has its adapter")
        return OutdatedReplyError(f"{server.url}: {error.message}")

    def _record_failure(self, server: Server, error: Exception, sent: float) -> None:
        reason, keeper = reason_of(error), self._router or self._reconciler
        if isinstance(error, OutdatedReplyError):
            return
        if not isinstance(error, ErrorReply):
            server.bad_replies += isinstance(error, BadResponse)
            keeper.failed(server, reason, at_once=isinstance(error, SilentServerError | OtherModelError))
        elif error.status == 429:
            self._gate.pool.throttled(server, reason, sent=sent, now=time.monotonic())
            if error.retry_after_s:
                self._gate.pool.wait(server, 1)
                asyncio.get_running_loop().call_later(error.retry_after_s, self._end_wait, server)
        elif error.status in RETRY_STATUSES:
            keeper.failed(server, reason, at_once=error.status in THIS_SERVER)

    def _end_wait(self, server: Server) -> None:
        self._gate.pool.wait(server, -1)
        self._gate.wake_for(server)

    async def _count_break(self, answer: Answer, last: str) -> None:
        answer.broken_streams += 1
        if answer.broken_streams >= self._max_tries:
            raise ServerError(
                f"the stream of request {answer.req.rid} broke {answer.broken_streams} times; the last: {last}"
            )
        await asyncio.sleep(pause_s(answer.broken_streams))


class Failures:
    """The failed tries of one call."""

    def __init__(self, max_tries: int) -> None:
        self._max_tries = max_tries
        self.servers: list[Server] = []
        self.last = ""
        self._tries = self._bad_replies = 0

    def record(self, server: Server, error: Exception) -> None:
        """Count a failure, as a try if the server has looked at the request; raise a refusal of the request."""
        self.last = f"{server.url} {reason_of(error)}"
        if server not in self.servers:
            self.servers.append(server)
        if isinstance(error, ErrorReply) and error.status not in RETRY_STATUSES:
            if error.status in (400, 413, 422):
                raise ConfigError(
                    f"{self.last}. The request breaks a rule of the server, so it is not sent again"
                ) from None
            raise ServerError(self.last) from None
        self._bad_replies += isinstance(error, BadResponse)
        away = isinstance(error, OutdatedReplyError | SilentServerError | aiohttp.ClientConnectorError) or (
            isinstance(error, ErrorReply) and error.status in AWAY
        )
        self._tries += not away

    def check(self) -> None:
        if self._tries >= self._max_tries or self._bad_replies > MAX_BAD_RESPONSES:
            raise ServerError(
                f"no usable answer in {self._tries} tries; the last: {self.last}. Are the servers up, and does "
                "rollout.addresses name them?"
            )


def pause_s(attempt: int, *, first_s: float = 0.1, longest_s: float = 5.0) -> float:
    """Return a random pause, so that requests that failed together do not come back together."""
    return random.uniform(0, min(longest_s, first_s * 2 ** min(attempt, 10)))


def reason_of(error: Exception) -> str:
    """Return how a request failed, after the server's name."""
    if isinstance(error, ErrorReply):
        return f"said HTTP {error.status}: {error.message}"
    if isinstance(error, BadResponse):
        return f"sent {error}"
    return f"failed: {type(error).__name__}: {error}"
