"""Checks of single request fields, and the error that an agent's HTTP client sees."""

import reprlib
from typing import Any, TypeVar
import orjson

T = TypeVar("T")


class RequestError(Exception):
    """An invalid request, answered with HTTP ``status`` and the API's error object."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code


def wrong(name: str, value: object, hint: str) -> RequestError:
    return RequestError(f"{name} is {short(value)}: {hint}", param=name)


def json_object(body: bytes) -> dict[str, Any]:
    """Return a request's body; raises RequestError for anything but a JSON object."""
    try:
        parsed = orjson.loads(body)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"the body is a {type(parsed).__name__}: send a JSON object")
    return parsed


def json_bytes(value: Any, option: int | None = None) -> bytes:
    """Return a part of a request as JSON; raises RequestError if it is nested too deeply."""
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        raise RequestError("the tools or the schema are nested too deeply: at most 250 levels") from None


def joined_text(raw: Any, where: str) -> str:
    """Return a string, or the texts of parts, joined by line breaks; raises RequestError for other parts."""
    if raw is None or isinstance(raw, str):
        return raw or ""
    texts = []
    for part in raw if isinstance(raw, list) else [raw]:
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where} has a part of type {short(kind)}: only text is supported", param=where)
        texts.append(part["text"])
    return "\n".join(texts)


def typed(name: str, value: Any, kind: type[T], hint: str) -> T | None:
    """Return an optional value of type ``kind``; raises RequestError for another type."""
    if value is not None and not isinstance(value, kind):
        raise wrong(name, value, hint)
    return value


def short(value: object) -> str:
    """Return a value as text for an error, at most 80 characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = reprlib.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
