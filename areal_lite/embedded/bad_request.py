"""Error answers of SGLang's HTTP dialect, for programs that speak it."""

from __future__ import annotations

from typing import Any


class BadRequest(Exception):
    def __init__(self, body: dict[str, Any], *, status: int = 400) -> None:
        super().__init__(str(body))
        self.body = body
        self.status = status


def invalid_value(message: str, *, status: int = 400) -> BadRequest:
    """Return the error for an invalid value, as SGLang sends it: ``{"error": {"message"}}``."""
    return BadRequest({"error": {"message": message}}, status=status)


def wrong_type(message: str) -> BadRequest:
    """Return the error for a value of the wrong type, as SGLang sends it: ``{"object": "error", ...}``."""
    return BadRequest({"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})
