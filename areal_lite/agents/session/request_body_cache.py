"""Read a JSON body of messages that begins like an earlier one without parsing the earlier messages again.

Guarantees the result of parsing the whole body: bytes that are equal up to the end of a message hold equal messages.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SPACE = b" \t\r\n"
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
"""The parts of JSON that change the depth: brackets, and strings, which may contain brackets."""
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NAME = b'"messages"'
_FIELD = re.compile(_NAME + rb"[ \t\r\n]*:[ \t\r\n]*\[")


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
        None if the field ``messages`` comes twice.
    """
    if known is not None and body.startswith(known.text):
        start, at = known.start, len(known.text)
    elif (start := _find_messages(body)) >= 0:
        at = start
    else:
        return None
    depth = 0
    for part in _PART.finditer(body, at):
        depth += _STEPS.get(body[part.start()], 0)
        if depth < 0:
            end = part.start()
            return None if body.find(_NAME, end) >= 0 else RequestBodyCache(body[:end].rstrip(_SPACE), start)
    return None


def _find_messages(body: bytes) -> int:
    """Return where the elements of the top-level field ``messages`` begin; -1 without it."""
    depth = 0
    for part in _PART.finditer(body):
        if depth == 1 and (field := _FIELD.match(body, part.start())):
            return field.end()
        depth += _STEPS.get(body[part.start()], 0)
    return -1
