"""Read a JSON body of messages that begins like an earlier one without parsing the earlier messages again.

Guarantees the result of parsing the whole body: bytes that are equal up to the end of a message hold equal messages.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import orjson

_SPACE = b" \t\r\n"
_NAME = b'"messages"'
_FIELD = re.compile(rb"(?<!\\)" + _NAME + rb"[ \t\r\n]*:[ \t\r\n]*\[")  # in a string, its quotes are escaped
_BEFORE_MESSAGE = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*(?=[^\s\]])")
_DECODER = json.JSONDecoder()


class RequestBodyCache(NamedTuple):
    """A JSON body up to the end of its last message."""

    text: bytes
    start: int
    """Index at which its messages begin."""

    def cut_from(self, body: bytes) -> bytes | None:
        """Return ``body`` without these messages; None if it does not begin with them or names the field again."""
        end = len(self.text)
        if not body.startswith(self.text) or body.find(_NAME, end) >= 0:
            return None
        rest = body[end:].lstrip(_SPACE)
        has_more = rest.startswith(b",")
        if has_more:
            rest = rest[1:].lstrip(_SPACE)
        if has_more == rest.startswith(b"]"):  # a value that goes on, or a comma too many
            return None
        return self.text[: self.start] + rest


def cache_request_body(body: bytes, known: RequestBodyCache | None = None) -> RequestBodyCache | None:
    """Return the beginning of a valid JSON object with at least one message; ``known`` saves time if it begins so.

    Returns:
        None if the field ``messages`` comes twice, or its messages are nested too deeply to find their ends.
    """
    if known is not None and body.startswith(known.text):
        start, end = known.start, len(known.text)
    elif (field := _FIELD.search(body)) is not None and _is_top_level(body[: field.start()]):
        start = end = field.end()
    else:
        return None
    rest = body[end:].decode("latin-1")  # a character for each byte
    at = 0
    try:
        while (before := _BEFORE_MESSAGE.match(rest, at)) is not None:
            _, at = _DECODER.raw_decode(rest, before.end())
    except (ValueError, RecursionError):
        return None
    return None if body.find(_NAME, end + at) >= 0 else RequestBodyCache(body[: end + at], start)


def _is_top_level(before: bytes) -> bool:
    """Return whether a field that follows is one of the body's object."""
    try:
        orjson.loads(before + b'"":0}')
    except ValueError:
        return False
    return True
