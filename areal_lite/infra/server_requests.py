"""HTTP requests to inference servers. Each is sent once: retries and the choice of the server are the caller's.

A server may take as long as it likes to answer if something arrives every ``request_timeout_s`` seconds. A reply
that cannot be trusted is never returned.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from areal_lite.api.config import InferenceEngineConfig
from areal_lite.errors import ServerError
from areal_lite.infra.backends.dialect import BadResponse, Chunk, ControlCall, Dialect, ErrorReply, ServerInfo
from areal_lite.infra.backends.token_stream import TokenStream
from areal_lite.infra.deadlines import Deadlines
from areal_lite.infra.server_pool import Server

logger = logging.getLogger(__name__)

REQUEST_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)
"""What a request raises if its server cannot be reached or stays silent."""
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


class ServerRequests:
    """Keep-alive connections to all servers; ``open`` and ``close`` on the loop they are used on."""

    def __init__(self, config: InferenceEngineConfig, dialect: Dialect) -> None:
        self._config = config
        self._dialect = dialect
        self._session: aiohttp.ClientSession | None = None
        self._silences: Deadlines[_Request] = Deadlines(config.request_timeout_s, _Request.give_up)
        self._warned_no_version = False
        self.limits = ServerInfo(vocab_size=_vocab_size(config.tokenizer_path))
        """What every request must respect: limits that servers, or the tokenizer's folder, report."""

    def open(self) -> None:
        """Open the session."""
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

    async def close(self) -> None:
        """Close all connections; servers drop what they still generate for us."""
        self._silences.close()
        if self._session is not None:
            await self._session.close()

    def respect(self, info: ServerInfo) -> None:
        """Narrow :attr:`limits` to those of one more server."""
        ours = self.limits
        self.limits = ServerInfo(
            context_length=min(filter(None, (ours.context_length, info.context_length)), default=None),
            vocab_size=min(filter(None, (ours.vocab_size, info.vocab_size)), default=None),
        )

    async def generate(
        self, server: Server, body: bytes, stream: TokenStream | None, *, version: int, top_logprobs: int
    ) -> Chunk:
        """Return the reply to one generation; its tokens go to ``stream`` as they arrive, if given.

        Args:
            server: Where to send it.
            body: JSON.
            stream: Reads the events of a streamed reply.
            version: Label of tokens whose version the server does not report.
            top_logprobs: Number of top log-probs asked for.

        Raises:
            ErrorReply: If the server refused.
            BadResponse: If the reply cannot be trusted or ends too early.
            ReceiverError: If the receiver of the stream raised.
        """
        status, reply, retry_after_s = await self._post(server, self._dialect.generate_path, body, stream)
        if status != 200:
            raise ErrorReply(status, _short(reply), retry_after_s)
        if stream is None:
            chunk = self._dialect.parse_generate(orjson.loads(reply), top_logprobs=top_logprobs)
            self._check_vocabulary(chunk)
            if chunk.versions is not None or not chunk.tokens:  # vLLM reports none for an answer without tokens
                return chunk
            chunk = replace(chunk, versions=[version] * len(chunk.tokens))
        else:
            if not stream.finished:
                raise BadResponse("a stream that ends before its answer does")
            chunk = stream.chunk()
            if stream.reports_versions:
                return chunk
        if not self._warned_no_version:
            self._warned_no_version = True
            logger.warning(
                "%s does not report the weight version of its tokens; they are labelled with the version at which the "
                "request was sent",
                server.url,
            )
        return chunk

    def _check_vocabulary(self, chunk: Chunk) -> None:
        vocab_size = self.limits.vocab_size
        if vocab_size and max(chunk.tokens, default=0) >= vocab_size:
            raise BadResponse(f"token {max(chunk.tokens)}, which is not in the vocabulary [0, {vocab_size})")

    async def _post(
        self, server: Server, path: str, body: bytes, stream: TokenStream | None = None
    ) -> tuple[int, bytes, float]:
        """Return status, body and the seconds of Retry-After; the body of a 200 goes to ``stream``, if given."""
        assert self._session is not None, "open() first"
        request = _Request()
        self._silences.add(request)
        server.outstanding += 1
        try:
            async with self._session.post(server.url + path, data=body, headers=_JSON, allow_redirects=False) as reply:
                if stream is not None and reply.status == 200:
                    await self._feed(stream, reply, request)
                    return 200, b"", 0.0
                after = "" if reply.status == 200 else reply.headers.get("Retry-After", "")
                return reply.status, await reply.read(), min(30.0, float(after)) if after.isdigit() else 0.0
        except asyncio.CancelledError:
            if request.timed_out and request.task.uncancel() == 0:
                if stream is not None and stream.finished:  # only the connection's end is missing
                    return 200, b"", 0.0
                raise TimeoutError(f"no answer in {self._config.request_timeout_s:g} s") from None
            raise
        finally:
            server.outstanding -= 1
            self._silences.discard(request)

    async def _feed(self, stream: TokenStream, reply: aiohttp.ClientResponse, request: _Request) -> None:
        """Pass the body on as it arrives; each part restarts the timeout."""
        try:
            async for data in reply.content.iter_any():
                self._silences.discard(request)
                self._silences.add(request)
                stream.feed(data)
        except (aiohttp.ClientError, OSError):
            if not stream.finished:
                raise

    async def info(self, server: Server) -> ServerInfo:
        """Return what the server reports about itself; nothing if it has no such route.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: If it cannot be reached.
        """
        assert self._session is not None, "open() first"
        async with self._session.get(server.url + self._dialect.info_path, allow_redirects=False) as reply:
            body = await reply.read()
            try:
                return self._dialect.parse_info(orjson.loads(body)) if reply.status == 200 else ServerInfo()
            except orjson.JSONDecodeError:
                return ServerInfo()

    async def control(self, server: Server, call: ControlCall) -> None:
        """Send a request of the control plane; raises ServerError if the server refuses."""
        status, reply, _ = await self._post(server, call.path, orjson.dumps(call.body))
        if status != 200:
            raise ServerError(f"{server.url}{call.path} said HTTP {status}: {_short(reply)}")
        try:
            error = self._dialect.update_error(orjson.loads(reply))
        except orjson.JSONDecodeError:
            return
        if error is not None:
            raise ServerError(f"{server.url}{call.path}: {error}")


def _vocab_size(folder: str | None) -> int | None:
    """Return the vocabulary size in the config.json of a model folder; None without one."""
    try:
        config = orjson.loads((Path(folder or "") / "config.json").read_bytes())
        size = config.get("text_config", config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def _short(reply: bytes) -> Any:
    return reply[:500].decode(errors="replace")
