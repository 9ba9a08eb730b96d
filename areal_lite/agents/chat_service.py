"""The HTTP interface for agents.

Guarantees that an agent reaches chat completions in its own session and nothing else. Knows no sockets:
:mod:`areal_lite.agents.http_transport` serves it inside the process; a proxy can serve it to other processes.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from typing import Any

import orjson

from areal_lite.agents.chat_request import RequestError
from areal_lite.agents.chat_session import ChatSession

MAX_BODY_BYTES = 8 * 2**20
_ENDED_KEPT = 10_000
HEADERS = {"content-type": "application/json", "x-should-retry": "false"}
"""Headers of every answer. SDKs must not retry: the engine client has the only retry loop."""


class ChatService:
    """Chat sessions by random key; a key gives access to its own session only."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, ChatSession] = {}
        self._ended: dict[bytes, None] = {}

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

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Answer one HTTP request.

        Args:
            method: HTTP method in upper case.
            path: Path without the query.
            headers: Lower-case names, or a mapping that ignores case.
            body: Raw bytes.

        Returns:
            Status, headers and a JSON body; errors have OpenAI's shape.
        """
        try:
            return 200, HEADERS, orjson.dumps(await self._route(method, path, headers, body))
        except RequestError as error:
            return error.status, HEADERS, orjson.dumps(error.body())

    async def _route(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Any:
        if path not in ("/v1/chat/completions", "/v1/models"):
            raise RequestError(
                f"{path[:80]!r} is not served: use /v1/chat/completions", status=404, code="not_found"
            )
        session = self._session(headers.get("authorization", ""))
        expected = "GET" if path == "/v1/models" else "POST"
        if method != expected:
            raise RequestError(f"{method[:20]} {path} is not served: use {expected}", status=405)
        if path == "/v1/models":
            model = {
                "id": "default",
                "object": "model",
                "created": int(time.time()),
                "owned_by": "areal_lite",
            }
            return {"object": "list", "data": [model]}
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body has {len(body)} bytes: at most {MAX_BODY_BYTES}", status=413)
        try:
            parsed = orjson.loads(body)
        except ValueError as error:
            raise RequestError(f"the body is not JSON: {error}") from None
        return await session.create(parsed)

    def _session(self, authorization: str) -> ChatSession:
        digest = _digest(authorization.removeprefix("Bearer "))
        session = self._sessions.get(digest)
        if session is not None:
            return session
        if digest in self._ended:
            raise RequestError(
                "the episode of this key has ended: await all model calls before run() returns",
                status=410,
                code="session_ended",
            )
        raise RequestError(
            "no session has this key: use the api_key passed to run()",
            status=401,
            code="invalid_api_key",
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
