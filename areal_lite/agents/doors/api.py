"""An API of agents: a body becomes a request, the answers to it go out as JSON or as server-sent events."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from areal_lite.agents.session.chat_answer import ChatAnswer, Piece
from areal_lite.agents.session.chat_request import ChatRequest
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError, short


class Api(ABC):
    """One call of an API; raises RequestError for a bad body."""

    id_prefix: str

    def __init__(self, body: bytes, session: ChatSession) -> None:
        self.session = session
        self.request = self.parse(body)
        self.id = self.id_prefix + secrets.token_hex(16)

    @abstractmethod
    def parse(self, raw: bytes) -> ChatRequest:
        """Return the checked request of an HTTP body."""

    @abstractmethod
    def reply(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """Return the JSON object of the whole answers."""

    @abstractmethod
    def start(self) -> bytes:
        """Return a stream's events before the text."""

    @abstractmethod
    def text(self, index: int, piece: Piece) -> bytes:
        """Return the events of a piece of text or reasoning of choice ``index``."""

    @abstractmethod
    def end(self, answers: Sequence[ChatAnswer]) -> bytes:
        """Return the events that complete the answers, tool calls and usage included."""

    @staticmethod
    def error(error: RequestError) -> dict[str, Any]:
        """Return the API's error object; here OpenAI's ``{"error": {message, type, param, code}}``."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}

    def error_event(self, error: RequestError) -> bytes:
        """Return the event of a failure in the middle of the stream."""
        return event(self.error(error))


def fields_as_chat(body: dict[str, Any], as_chat: dict[str, str], known: set[str]) -> dict[str, Any]:
    """Return the fields that a chat completion has too, by their names there; raise if one is not in ``known``."""
    if unknown := [name for name in body if name not in known]:
        raise RequestError(f"unknown field {short(unknown[0])}: leave it out", param=unknown[0][:80])
    return {name: body[field] for field, name in as_chat.items() if body.get(field) is not None}


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
