"""Answers at the listener's socket while the event loop behind it is blocked.

Guarantees that only the session whose code blocks the loop is refused: connections of others are given to the loop,
which serves them when it runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import orjson

_MAX_HEAD_BYTES = 1 << 16
_BODY_SECONDS = 1.0


class BlockedLoopResponder:
    """Accepts connections in place of a blocked event loop; ``refuse`` is for another thread, the rest for the loop."""

    def __init__(self, listening: socket.socket, protocol: Callable[[], Any]) -> None:
        self._listening: socket.socket | None = listening  # shared with the loop, whose protocol serves connections
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._accepted: deque[socket.socket] = deque()
        """Connections of nobody yet; whoever takes one out, this thread or the loop, owns it."""
        self._adopting: set[asyncio.Task[Any]] = set()

    def close(self) -> None:
        self._listening = None
        while self._accepted:
            self._accepted.popleft().close()

    def refuse(self, key: str, error: dict[str, Any]) -> None:
        """Answer 503 with ``error`` to waiting requests that carry ``key``; leave the others to the loop."""
        if (listening := self._listening) is None:
            return
        with contextlib.suppress(OSError):  # none is waiting, or the listener is closed
            while True:
                connection, _ = listening.accept()
                connection.setblocking(False)
                self._accepted.append(connection)
        for _ in range(len(self._accepted)):
            try:
                connection = self._accepted.popleft()
            except IndexError:  # the loop runs again and took them
                return
            if key.encode() in _peek(connection):
                _answer(connection, orjson.dumps(error))
            else:
                self._accepted.append(connection)
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._adopt)

    def _adopt(self) -> None:
        while self._accepted:
            connection = self._accepted.popleft()
            if self._listening is None:
                connection.close()
                continue
            task = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, connection))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)


def _peek(connection: socket.socket) -> bytes:
    """Return the head of a request, as far as it has arrived, and leave it there."""
    try:
        return connection.recv(_MAX_HEAD_BYTES, socket.MSG_PEEK).partition(b"\r\n\r\n")[0]
    except OSError:
        return b""


def _answer(connection: socket.socket, body: bytes) -> None:
    """Read the request, answer it and close; a client that is still sending would miss the answer."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_BODY_SECONDS)
        head, _, rest = connection.recv(_MAX_HEAD_BYTES).partition(b"\r\n\r\n")
        sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        missing = (int(sizes[0].partition(b":")[2]) if sizes else 0) - len(rest)
        with contextlib.suppress(TimeoutError):
            while missing > 0 and (piece := connection.recv(1 << 16)):
                missing -= len(piece)
        connection.sendall(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nx-should-retry: false\r\n"
            b"connection: close\r\ncontent-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
