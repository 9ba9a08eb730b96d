"""An API of agents: a body becomes a request, the answers to it go out as JSON or as server-sent events. All requests
are read as the body of a chat completion, so an API says how it writes its fields there."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
import orjson
from areal_lite.agents.session.chat_answer import ChatAnswer, Piece
from areal_lite.agents.session.chat_request import ChatRequest, parse_chat_request
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError, json_object, short


class Api(ABC):
    """One call of an API; raises RequestError for a bad body."""

    id_prefix: str
    as_chat: dict[str, str]
    """Fields with the same meaning as a chat completion's, by their name there."""
    other_fields: set[str]
    """Fields that :meth:`chat` reads, and those without effect on the tokens, which are ignored."""

    def __init__(self, body: bytes, session: ChatSession) -> None:
        self.session = session
        self.request = self.parse(body)
        self.id = self.id_prefix + secrets.token_hex(16)

    def parse(self, raw: bytes) -> ChatRequest:
        """Return the checked request of an HTTP body."""
        body = json_object(raw)
        if unknown := [name for name in body if name not in self.as_chat and name not in self.other_fields]:
            raise RequestError(f"unknown field {short(unknown[0])}: leave it out", param=unknown[0][:80])
        chat = {name: body[field] for field, name in self.as_chat.items() if body.get(field) is not None}
        return parse_chat_request(chat | self.chat(body), self.session.history.find, images=self.session.images)

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the other fields of the same chat completion, such as its messages; None for those not given."""
        return body

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


RAW_ARGUMENTS = "_arguments"
"""Key of a call's arguments that are not a JSON object, as the model wrote them, in APIs that have objects there."""


def arguments_object(text: str) -> Any:
    """Return the arguments of a call as an object, to be written as JSON."""
    try:
        is_object = isinstance(orjson.loads(text), dict)
    except ValueError:
        is_object = False
    # As the text itself: orjson reads deeper nesting than it writes.
    return orjson.Fragment(text) if is_object else {RAW_ARGUMENTS: text}


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(data) + b"\n\n"
