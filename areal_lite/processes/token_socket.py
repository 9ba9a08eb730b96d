"""A TCP connection to one program on another machine, in place of the socket that a child inherits.

Guarantees that only the program that was given the token gets the connection, and that it talks with nobody else: it
sends the first half and goes on once it has got the second, since it unpickles what follows. The port closes with the
first connection that is accepted. Until then a stranger who connects, says nothing or guesses keeps nobody waiting:
each connection has its own seconds. The token is in the program's environment until it connects, where only the same
user can read it; what is sent afterwards is not encrypted, so the network must be one that only the cluster uses.
"""

import asyncio
import hmac
import os
import secrets
import socket
from contextlib import suppress

_VARIABLE = "AREAL_LITE_CONNECTION"
_HALF = 32  # bytes
HELLO_S = 10.0
"""Seconds in which a connection must present the token."""
_MAX_STRANGERS = 64


class TokenListener:
    """A port of ``host`` for one connection; ``variables`` are for the environment of the program that makes it."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        token = secrets.token_bytes(2 * _HALF)
        self._expected, self._reply = token[:_HALF], token[_HALF:]
        self.variables = {_VARIABLE: f"{host} {self._socket.getsockname()[1]} {token.hex()}"}

    async def accept(self) -> socket.socket:
        """Return the connection that presents the token, non-blocking; close all others, and the port."""
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[socket.socket] = loop.create_future()
        tasks: set[asyncio.Task[None]] = set()

        async def admit() -> None:
            while True:
                connection, _ = await loop.sock_accept(self._socket)
                if len(tasks) > _MAX_STRANGERS:
                    connection.close()
                    continue
                tasks.add(task := loop.create_task(check(connection)))
                task.add_done_callback(tasks.discard)

        async def check(connection: socket.socket) -> None:
            with connection, suppress(TimeoutError, OSError):
                async with asyncio.timeout(HELLO_S):
                    said = b""
                    while len(said) < _HALF and (piece := await loop.sock_recv(connection, _HALF - len(said))):
                        said += piece
                    if hmac.compare_digest(said, self._expected):
                        await loop.sock_sendall(connection, self._reply)
                        if not accepted.done():
                            accepted.set_result(connection.dup())

        tasks.add(loop.create_task(admit()))
        try:
            connection = await accepted
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a message waits for no other
            return connection
        finally:
            for task in list(tasks):
                task.cancel()
            await asyncio.wait(tasks)
            self._socket.close()


def connect() -> socket.socket:
    """Return the connection to the listener that this process was started for, blocking; raises OSError."""
    host, port, token = os.environ.pop(_VARIABLE).split()
    token_bytes = bytes.fromhex(token)
    connection = socket.create_connection((host, int(port)), timeout=HELLO_S)
    try:
        connection.sendall(token_bytes[:_HALF])
        reply = b""
        while len(reply) < _HALF and (piece := connection.recv(_HALF - len(reply))):
            reply += piece
        if not hmac.compare_digest(reply, token_bytes[_HALF:]):
            raise ConnectionError(f"{host}:{port} is not the run that started this program")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
