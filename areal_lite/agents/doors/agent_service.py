"""The HTTP interface for agents: OpenAI's, Anthropic's and Gemini's APIs, each session behind a key of its own.

Guarantees that an agent can generate in its own session and do nothing else. Knows no sockets: it has two doors, the
in-process transport (``http_transport``) and the ``listener``.
"""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple, Self
import orjson
from areal_lite.agents.doors.api import Api
from areal_lite.agents.doors.completions import ChatCompletions, Completions
from areal_lite.agents.doors.generate_content import CountTokens, GenerateContent, StreamGenerateContent
from areal_lite.agents.doors.messages import Messages
from areal_lite.agents.doors.responses import Responses, stored_response
from areal_lite.agents.session.chat_answer import ChatAnswer, Piece
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError

MAX_BODY_BYTES = 64 * 2**20
"""Room for several images in base64."""
_LARGE_BODY = 2**16
"""Bytes of a body whose JSON takes the SDK and the service milliseconds; other episodes run between two of these."""
_ENDED_KEPT = 10_000
_HEADERS = {"x-should-retry": "false"}
"""SDKs must not retry: the engine client has the only retry loop."""
JSON_HEADERS = {"content-type": "application/json", **_HEADERS}
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **_HEADERS}
_APIS: dict[str, type[Api]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/messages/count_tokens": Messages,
    "/v1beta/models/NAME:generateContent": GenerateContent,
    "/v1beta/models/NAME:streamGenerateContent": StreamGenerateContent,
    "/v1beta/models/NAME:countTokens": CountTokens,
}
_COUNTED = {"/v1/messages/count_tokens": "input_tokens", "/v1beta/models/NAME:countTokens": "totalTokens"}
"""Routes that count the tokens of a prompt, and the name of the number."""
_GEMINI = re.compile(r"/v1(?:beta)?/models/[^/:]+(:\w+)")
_MODELS = "/v1/models"
_MODEL = {"id": "default", "object": "model", "created": int(time.time()), "owned_by": "areal_lite"}
_STORED = "/v1/responses/"


class Reply(NamedTuple):
    """An HTTP response; a streamed body has to be closed."""

    status: int
    headers: Mapping[str, str]
    body: "bytes | EventBody"


class EventBody:
    """Server-sent events of an answer that is generated from now on; closing it ends the generation."""

    def __init__(self, call: Api) -> None:
        self._call = call
        self._pieces: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()
        self._first: tuple[int, Piece] | None = None
        self._task: asyncio.Task[list[ChatAnswer]] = asyncio.create_task(
            call.session.answer(call.request, call.id, on_text=lambda *piece: self._pieces.put_nowait(piece))
        )
        call.session.own(self._task)
        self._task.add_done_callback(lambda _: self._pieces.put_nowait(None))

    async def begin(self) -> Self:
        """Wait for the first text; an error before it is raised, so that it becomes a plain reply."""
        try:
            self._first = await self._pieces.get()
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if self._first is None:
            self._answers()
        return self

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            ready = [self._call.start()]  # one write for all that came meanwhile
            arrived = self._first
            while arrived is not None:
                ready.append(self._call.text(*arrived))
                if self._pieces.empty():
                    yield b"".join(ready)
                    ready.clear()
                arrived = await self._pieces.get()
            try:
                ready.append(self._call.end(self._answers()))
            except RequestError as error:
                ready.append(self._call.error_event(error))
            yield b"".join(ready)
        finally:
            self._task.cancel()

    async def aclose(self) -> None:
        self._task.cancel()

    def _answers(self) -> list[ChatAnswer]:
        if self._task.cancelled():
            raise RequestError("the episode has ended", status=410, code="session_ended")
        return self._task.result()


class AgentService:
    """Sessions by random key; a key gives access to its own session only."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, ChatSession] = {}
        self._ended: dict[bytes, None] = {}
        self._turn = asyncio.Lock()

    def open(self, session: ChatSession) -> str:
        """Return a new key for ``session``; the service stores only its digest."""
        key = "al_" + secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = session
        return key

    def close(self, key: str) -> None:
        """End the session of ``key``; later requests with it get status 410."""
        digest = _digest(key)
        self._sessions.pop(digest).close()
        self._ended[digest] = None
        if len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Answer one HTTP request; errors have the API's own form."""
        key_in_path, path, query = _route(path)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        key = key_in_path or headers.get("x-api-key") or headers.get("x-goog-api-key") or bearer
        is_large = len(body) > _LARGE_BODY
        try:
            if is_large:
                await self._alone()
            session = self._session(key)
            if path in (_MODELS, f"{_MODELS}/default"):
                _require(method, "GET", path)
                return _json({"object": "list", "data": [_MODEL]} if path == _MODELS else _MODEL)
            if path.startswith(_STORED):
                return _json(stored_response(method, path.removeprefix(_STORED), query, session))
            if (api := _APIS.get(path)) is None:
                served = ", ".join([*_APIS, _MODELS])
                raise RequestError(f"{path[:80]!r} is not served: use {served}", status=404, code="not_found")
            _require(method, "POST", path)
            try:
                if len(body) > MAX_BODY_BYTES:
                    raise RequestError(f"the body has {len(body)} bytes: at most {MAX_BODY_BYTES}", status=413)
                call = api(body, session)
            except RequestError as error:
                session.refusal = error
                raise
            if path in _COUNTED:
                return _json({_COUNTED[path]: await session.count_tokens(call.request)})
            if call.request.options.stream:
                return Reply(200, STREAM_HEADERS, await EventBody(call).begin())
            reply = _json(call.reply(await session.answer(call.request, call.id)))
            if is_large:
                await self._alone()
            return reply
        except RequestError as error:
            return error_reply(path, error)

    async def _alone(self) -> None:
        """Return in a pass of the event loop in which no other large request goes on."""
        async with self._turn:
            await asyncio.sleep(0)

    def _session(self, key: str) -> ChatSession:
        digest = _digest(key)
        if (session := self._sessions.get(digest)) is not None:
            return session
        if digest in self._ended:
            raise RequestError(
                "the episode of this key has ended: make the client in run() with its api_key, and await all model "
                "calls before it returns",
                status=410,
                code="session_ended",
            )
        raise RequestError(
            "no session has this key: use the api_key passed to run()", status=401, code="invalid_api_key"
        )


def error_reply(path: str, error: RequestError) -> Reply:
    """Return an error in the form of the API that serves ``path``."""
    return Reply(error.status, JSON_HEADERS, orjson.dumps(_APIS.get(_route(path)[1], ChatCompletions).error(error)))


def _route(path: str) -> tuple[str, str, str]:
    """Return the key in a path, of clients that can send no header, the route as ``_APIS`` has it, and the query."""
    key = ""
    path, _, query = path.partition("?")
    if path.startswith("/s/"):
        key, _, rest = path[3:].partition("/")
        path = f"/{rest}"
    if path.startswith("/v1/v1/"):  # Anthropic's SDK with the base_url of OpenAI's
        path = path[3:]
    return key, _GEMINI.sub(r"/v1beta/models/NAME\1", path), query


def _require(method: str, expected: str, path: str) -> None:
    if method != expected:
        raise RequestError(f"{method[:20]} {path} is not served: use {expected}", status=405)


def _json(value: Any) -> Reply:
    return Reply(200, JSON_HEADERS, orjson.dumps(value))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
