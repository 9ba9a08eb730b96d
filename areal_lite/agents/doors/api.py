"""What an API of agents has to give, and server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from areal_lite.agents.session.chat_request import ChatRequest
from areal_lite.agents.session.chat_session import Answer, ChatSession
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.agents.session.text_stream import Piece


class EventStream(Protocol):
    """Writes one answer as server-sent events."""

    def start(self, answer_id: str) -> bytes:
        """Return the events before the text."""

    def text(self, index: int, piece: Piece) -> bytes:
        """Return the events of a piece of text or reasoning of choice ``index``."""

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the events that complete the answers, tool calls and usage included."""

    def error(self, error: RequestError) -> bytes:
        """Return the event of a failure in the middle of the stream."""


class Api(Protocol):
    """Turns an API's bodies into requests, and answers into its replies."""

    id_prefix: str

    def parse(self, raw: bytes, session: ChatSession) -> ChatRequest:
        """Return the checked request; raises RequestError."""

    def reply(self, request: ChatRequest, answers: Sequence[Answer], session: ChatSession) -> dict[str, Any]:
        """Return the JSON object of a whole answer."""

    def stream(self, request: ChatRequest, session: ChatSession) -> EventStream:
        """Return a writer for a streamed answer."""

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return the API's error object."""


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return ``{"error": {message, type, param, code}}``."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
