"""Messages between the run and a child process: one framing, one rule about who may send what, and exceptions.

A message is eight bytes of length and a body. Its end is known before its content is read, so a reader never depends on
what the body holds, and a child that dies in the middle of a message is seen as the end of the stream.

Towards a child, the body is a pickle: the run is trusted by its own children, and users' functions, agents and rows can
be sent no other way. From a child, the body is JSON, followed by arrays as plain bytes (:func:`encode_reply`). A child
runs users' code on what a model wrote, and whoever can make it send a pickle runs code in the run, which holds keys,
weights and checkpoints. Three designs that look safe are not: a restricted ``Unpickler`` still calls what it allows,
and a forgotten entry opens it; ``marshal`` makes no calls, but malformed input may crash the interpreter; a pickle
that is only read on success is still read.

A reader bounds the length before it allocates: a child that writes noise into its socket, by mistake or not, ends its
own connection and does not exhaust the run's memory. Both ends may still block while the other does not read; callers
that cannot wait set a timeout.

Imports only what starts quickly, and no asyncio: reward and agent processes load this module first.
"""

import builtins
import contextlib
import json
import struct
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

_LENGTH = struct.Struct("!Q")
MAX_MESSAGE = 2**30
"""Largest body in bytes that a child may send."""


class BrokenMessageError(ConnectionError):
    """The stream ended within a message, or holds something else than messages."""


def framed(body: bytes) -> bytes:
    """Return a message as it is sent."""
    return _LENGTH.pack(len(body)) + body


def read_message(stream: "IO[bytes] | socket.SocketIO", *, max_bytes: int | None = None) -> bytes | None:
    """Return the next body of a blocking stream; None at its end. The run's messages to a child have no bound."""
    header = _read(stream, _LENGTH.size)
    if not header:
        return None
    size = _size_of(header, max_bytes)
    body = _read(stream, size)
    if len(body) < size:
        raise BrokenMessageError("the stream ended within a message")
    return body


def _read(stream: "IO[bytes] | socket.SocketIO", size: int) -> bytes:
    data = stream.read(size) or b""
    while data and len(data) < size and (more := stream.read(size - len(data))):  # an unbuffered stream reads less
        data += more
    return data


def _size_of(header: bytes | bytearray, max_bytes: int | None, start: int = 0) -> int:
    if len(header) < _LENGTH.size:
        raise BrokenMessageError("the stream ended within a message")
    (size,) = _LENGTH.unpack_from(header, start)
    if max_bytes is not None and size > max_bytes:
        raise BrokenMessageError(f"a message of {size} bytes, above the limit of {max_bytes}")
    return int(size)


class MessageSplitter:
    """Cuts arriving bytes into messages, however they were cut on their way."""

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """Add what arrived and yield the bodies that are complete; each is valid until the next one."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) >= start + _LENGTH.size:
                body = start + _LENGTH.size
                end = body + _size_of(buffer, self._max_bytes, start)
                if len(buffer) < end:
                    break
                start = end
                with memoryview(buffer) as view, view[body:end] as part:
                    yield part
        finally:
            del buffer[:start]


def encode_reply(head: Any, columns: Sequence[bytes] = ()) -> bytes:
    """Return the body of a child's message: ``head`` as JSON, then the bytes of ``columns``. Numbers of numpy and torch
    become Python's; what has no JSON form becomes its ``repr``."""
    text = _ENCODER.encode([head, [len(column) for column in columns]]).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *columns))


def decode_reply(body: bytes | memoryview) -> tuple[Any, list[bytearray]]:
    """Return head and columns of :func:`encode_reply`; tuples have become lists; raises BrokenMessageError."""
    try:
        at = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        head, sizes = json.loads(bytes(body[_LENGTH.size : at]))
        columns = []
        for size in sizes:
            if not 0 <= size <= len(body) - at:  # going back would copy a part again and again
                raise ValueError("a column outside of the message")
            columns.append(bytearray(body[at : at + size]))  # aligned and writable, as arrays need it
            at += size
    except (ValueError, TypeError, RecursionError, struct.error) as error:
        raise BrokenMessageError(f"a message that is no reply ({type(error).__name__})") from None
    return head, columns


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return value.item() if hasattr(value, "item") else float(value)
    except (TypeError, ValueError):
        return repr(value)[:200]


_ENCODER = json.JSONEncoder(default=_plain)


_MAX_ERROR_TEXT = 8192
_FACTS = "failure_kind", "failure_hint"
"""Attributes of an exception that it keeps."""


def describe(error: BaseException) -> list[str | None]:
    """Return what :func:`rebuilt` makes an exception of again, in the run."""
    text = "".join(traceback.format_exception(error))
    try:
        message = str(error.args[0] if len(error.args) == 1 else error)  # str() of a KeyError has quotes
    except Exception:  # a user's class may break its own text
        message = "(its text cannot be read)"
    facts = [fact if isinstance(fact := getattr(error, name, None), str) else None for name in _FACTS]
    return [type(error).__name__, message[:_MAX_ERROR_TEXT], text[-_MAX_ERROR_TEXT:], *facts]


def rebuilt(name: str, message: str, text: str, *facts: str | None) -> Exception:
    """Return the exception: its builtin class, or a RuntimeError of the same name; a note has the child's traceback."""
    known = getattr(builtins, name, None)
    error: Any = None
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError and its like take more than a text
            error = known(message)
    if error is None:
        error = type(name, (RuntimeError,), {})(message)
    for attribute, fact in zip(_FACTS, facts, strict=True):
        if fact is not None:
            setattr(error, attribute, fact)
    error.add_note(f"in its worker process:\n{text}")
    raised: Exception = error
    return raised
