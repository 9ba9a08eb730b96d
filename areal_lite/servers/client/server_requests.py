"""HTTP requests to inference servers. Each is sent once: retries and the choice of the server are the caller's.

A request may take any time while its server sends something, to it or to others, every ``request_timeout_s`` seconds. A
reply that has begun is counted alone, and must come on: a whole one in that time, a stream with tokens
(``min_stream_tokens_per_s``). A reply that cannot be trusted is never returned, nor read beyond what was asked for.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Mapping
from typing import Any
import aiohttp
import orjson
from areal_lite.config.rollout_config import FaultsConfig, InferenceEngineConfig
from areal_lite.errors import ServerError
from areal_lite.processes.deadlines import Deadlines
from areal_lite.servers.client.connections import Connector, Reply
from areal_lite.servers.client.model_identity import read_config
from areal_lite.servers.dialects import Dialect, dialect
from areal_lite.servers.dialects.dialect import ErrorReply, GenerationCall, ServerInfo, ServerLimits, reported
from areal_lite.servers.dialects.reply_reader import Receiver, ReplyReader
from areal_lite.servers.pool.server_pool import Server

_NO_VERSION = "does not report the weight version of its tokens; they get the one at which the request was sent"
REQUEST_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)  # of a server that cannot be reached or stays silent
CONTROL_TIMEOUT_S = 25.0  # seconds for a request of the control plane; loading weights may take longer
MAX_CONTROL_REPLY = 2**24  # bytes of the longest reply that is not an answer
MAX_RETRY_AFTER_S = 30.0
ADAPTER_PREFIX = "areal-lite-"  # beginning of the names of the adapters that runs load


class SilentServerError(TimeoutError):
    """A request was given up because its server sent nothing."""


class RefusedError(ServerError):
    """A server refused a request of the control plane; sent again, it would be refused again."""


class _Request:
    def __init__(self, server: Server) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.server = server
        self.begun = False  # a part of its reply has come, so it does not wait in the server's queue
        self.given_up: str | None = None
        self._tokens = 0
        self._heard = self._saved_s = 0.0

    def give_up(self, reason: str) -> None:
        if self.given_up is None:
            self.given_up = reason
            self.task.cancel()

    def comes_on(self, num_tokens: int, faults: FaultsConfig) -> bool:
        """Count a part of a stream, which then has ``num_tokens``; return whether it is fast enough."""
        now, most = time.monotonic(), faults.request_timeout_s
        if not self.begun:  # what came before is the server's queue
            self.begun, self._heard, self._saved_s = True, now, most
        earned_s = (num_tokens - self._tokens) / faults.min_stream_tokens_per_s
        self._saved_s = min(most, self._saved_s - (now - self._heard) + earned_s)
        self._heard, self._tokens = now, num_tokens
        return self._saved_s >= 0


class ServerRequests:
    """Keep-alive connections to all servers, of the loop that uses them first; ``aclose`` ends them there."""

    def __init__(self, config: InferenceEngineConfig, dialect: Dialect) -> None:
        self._config = config
        self.dialect = dialect
        self._silences: Deadlines[_Request] = Deadlines(config.faults.request_timeout_s, self._on_silence)
        self._warned_no_version = False
        self.limits = ServerLimits(vocab_size=reported(read_config(config.tokenizer_path), "vocab_size", int))
        """Those of the tokenizer's folder, narrowed by what servers report."""
        self.version = 0  # the client's policy version, that of tokens whose version a server does not report

    @functools.cached_property
    def _connector(self) -> Connector:
        count = 1 if self._config.router is None else len(self._config.addresses)
        faults = self._config.faults
        return Connector(faults.connect_timeout_s, limit_per_host=count * faults.max_connections_per_server)

    @functools.cached_property
    def _control(self) -> Connector:
        """For the control plane, which must reach a server whose connections are all busy with generations."""
        return Connector(self._config.faults.connect_timeout_s)

    async def aclose(self) -> None:
        self._silences.close()
        await self._connector.close()
        await self._control.close()
        del self._connector, self._control  # an engine may start again, on another loop

    def reader(self, call: GenerationCall, receive: Receiver | None = None) -> ReplyReader:
        """Return what reads the reply to a call that is sent now; a stream's tokens go to ``receive``."""
        return ReplyReader(self.dialect, call, receive, version=self.version, limits=self.limits)

    async def generate(
        self, server: Server, body: bytes, reader: ReplyReader, *, headers: Mapping[str, str] | None = None
    ) -> dialect.Chunk:
        """Send a generation and return what ``reader`` reads, a stream as it arrives; raises ErrorReply unless 200."""
        request = _Request(server)
        self._silences.add(request)
        reply: Reply | None = None
        try:
            reply = await self._connector.send("POST", server.url + self.dialect.generate_path, body, headers)
            if reply.status != 200:
                after = reply.headers.get("Retry-After", "")
                wait_s = min(MAX_RETRY_AFTER_S, float(after)) if after.isdigit() else 0.0
                raise ErrorReply(reply.status, message_of(await bounded_body(reply.content)), wait_s)
            if reader.call.stream:
                await self._feed(reader, reply.content, request)
            else:
                if not reply.content.is_eof():  # its end comes at once: servers send it when the answer is complete
                    self._silences.discard(request)
                    self._silences.add(request)
                    request.begun = True
                reader.take(await bounded_body(reply.content, reader.call.max_reply_bytes))
        except asyncio.CancelledError:
            if request.given_up is None or request.task.uncancel():
                raise
            if reader.finish is None:  # else only the connection's end is missing
                raise SilentServerError(request.given_up) from None
        finally:
            self._silences.discard(request)
            if reply is not None:
                reply.connection.release()  # one with a rest to read is closed
        if not reader.reports_versions and not self._warned_no_version:
            self._warned_no_version = True
            server.say_once(_NO_VERSION, logging.WARNING)
        return reader.whole()

    def _on_silence(self, request: _Request) -> None:
        """Give up a request, unless its server answers others meanwhile and it may be in the queue or a long answer.
        What a router sends to others may come from another server."""
        heard = 0.0 if request.server.is_router else request.server.heard
        if not request.begun and time.monotonic() - heard < self._config.faults.request_timeout_s:
            self._silences.add(request)
        else:
            request.give_up(f"no answer in {self._config.faults.request_timeout_s:g} s")

    def give_up(self, server: Server, reason: str) -> None:
        for request in self._silences.pending():
            if request.server is server:
                request.give_up(reason)

    async def _feed(self, reader: ReplyReader, content: aiohttp.StreamReader, request: _Request) -> None:
        faults = self._config.faults
        try:
            async for data in content.iter_any():
                self._silences.discard(request)
                self._silences.add(request)
                request.server.heard = time.monotonic()
                reader.feed(data)
                if not request.comes_on(len(reader), faults):
                    raise SilentServerError(f"a stream of less than {faults.min_stream_tokens_per_s:g} tokens/s")
        except (aiohttp.ClientError, OSError):
            if reader.finish is None:
                raise

    async def info(self, server: Server) -> ServerInfo:
        """Return what the server reports about itself; an unknown route reports nothing; raises ErrorReply."""
        facts: dict[str, Any] = {}
        known = False
        for path in self.dialect.info_paths:
            status, body = await self.exchange(server, path)
            if status == 200:
                known = True
                with contextlib.suppress(orjson.JSONDecodeError):
                    if isinstance(reply := orjson.loads(body), dict):
                        facts |= {name: value for name, value in reply.items() if value is not None}
        if not known and (status := (await self.exchange(server, self.dialect.health_path))[0]) != 200:
            paths = ", ".join((*self.dialect.info_paths, self.dialect.health_path))
            raise ErrorReply(status, f"{server.url} said HTTP {status} to {paths}")
        return self.dialect.parse_info(facts)

    async def adapters(self, server: Server) -> list[str]:
        status, body = await self.exchange(server, "/v1/models")
        names = [str(model["id"]) for model in orjson.loads(body)["data"]] if status == 200 else []
        return [name for name in names if name.startswith(ADAPTER_PREFIX)]

    async def is_healthy(self, server: Server) -> bool:
        """Return whether the health route answers in time; SGLang's takes 20 s to say that it is stuck."""
        try:
            return (await self.exchange(server, self.dialect.health_path))[0] < 500
        except REQUEST_ERRORS:
            return False

    async def exchange(
        self,
        server: Server,
        path: str,
        *,
        method: str = "GET",
        body: Any = None,
        timeout_s: float | None = None,
        max_bytes: int = MAX_CONTROL_REPLY,
    ) -> tuple[int, bytes]:
        """Return status and body; raises aiohttp.ClientError, TimeoutError or OSError if there is none in time."""
        async with asyncio.timeout(timeout_s or CONTROL_TIMEOUT_S):
            reply = await self._control.send(method, server.url + path, None if body is None else orjson.dumps(body))
            try:
                return reply.status, await bounded_body(reply.content, max_bytes)
            finally:
                reply.connection.release()

    async def ask(self, server: Server, method: str, path: str, body: Any = None, **limits: Any) -> bytes:
        """Return a route's reply; raises RefusedError for a status from 300, OSError if it says that it is away."""
        status, text = await self.exchange(server, path, method=method, body=body, **limits)
        if status >= 300:
            kind = OSError if status in (429, 502, 503, 504) else RefusedError
            raise kind(f"{server.url}{path} said HTTP {status}: {message_of(text)}")
        return text

    async def control(self, server: Server, call: dialect.ControlCall, *, timeout_s: float | None = None) -> None:
        """Send a request of the control plane; raises as :meth:`ask`, and RefusedError if the reply is a failure."""
        text = await self.ask(server, "POST", call.path, call.body, timeout_s=timeout_s)
        with contextlib.suppress(orjson.JSONDecodeError):
            if (error := dialect.update_error(orjson.loads(text))) is not None:
                raise RefusedError(f"{server.url}{call.path}: {error}")


async def bounded_body(content: aiohttp.StreamReader, max_bytes: int = MAX_CONTROL_REPLY) -> bytes:
    """Return the body of a reply; raises ClientPayloadError, and reads no more, once it is above ``max_bytes``."""
    body = content.read_nowait() if content.is_eof() else b""  # the usual short reply is there with its head
    parts, size = [body], len(body)
    while size <= max_bytes and not content.at_eof():
        parts.append(await content.readany())
        size += len(parts[-1])
    if size > max_bytes:
        raise aiohttp.ClientPayloadError(f"a reply of more than {max_bytes} bytes")
    return b"".join(parts)


def message_of(reply: bytes) -> str:
    """Return what an error reply says: its message if it is JSON with one, else its beginning."""
    text = reply[:500].decode(errors="replace")
    with contextlib.suppress(orjson.JSONDecodeError):
        parsed: Any = orjson.loads(reply)
        if isinstance(parsed, dict):
            parsed = parsed.get("error", parsed)
            text = str(parsed.get("message", text) if isinstance(parsed, dict) else parsed)[:500]
    return text
