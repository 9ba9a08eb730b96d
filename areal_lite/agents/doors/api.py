"""An API of agents: its requests become one record, its answers go out as JSON or as server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from areal_lite.agents.session.chat_answer import Answer
from areal_lite.agents.session.chat_request import ChatRequest
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError, short
from areal_lite.agents.session.text_stream import Piece


class EventStream(ABC):
    """Writes one answer as server-sent events."""

    def __init__(self, request: ChatRequest, session: ChatSession) -> None:
        self.request = request
        self.session = session

    @abstractmethod
    def start(self, answer_id: str) -> bytes:
        """Return the events before the text."""

    @abstractmethod
    def text(self, index: int, piece: Piece) -> bytes:
        """Return the events of a piece of text or reasoning of choice ``index``."""

    @abstractmethod
    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the events that complete the answers, tool calls and usage included."""

    def error(self, error: RequestError) -> bytes:
        """Return the event of a failure in the middle of the stream."""
        return event(openai_error(error))


class Api(ABC):
    """Turns an API's bodies into requests, and answers into its replies."""

    id_prefix: str
    event_stream: type[EventStream]

    @abstractmethod
    def parse(self, raw: bytes, session: ChatSession) -> ChatRequest:
        """Return the checked request; raises RequestError."""

    @abstractmethod
    def reply(self, request: ChatRequest, answers: Sequence[Answer], session: ChatSession) -> dict[str, Any]:
        """Return the JSON object of a whole answer."""

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return the API's error object."""
        return openai_error(error)


def fields_as_chat(body: dict[str, Any], as_chat: dict[str, str], known: set[str]) -> dict[str, Any]:
    """Return the fields that a chat completion has too, by their names there; raise if one is not in ``known``."""
    if unknown := [name for name in body if name not in known]:
        raise RequestError(f"unknown field {short(unknown[0])}: leave it out", param=unknown[0][:80])
    return {name: body[field] for field, name in as_chat.items() if body.get(field) is not None}


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return ``{"error": {message, type, param, code}}``."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
