"""Only the program with the token gets the connection, and only from the run that started it."""

from __future__ import annotations
import asyncio
import os
import socket
import threading
import pytest
from areal_lite.processes import token_socket
from areal_lite.processes.token_socket import TokenListener, connect
from tests.rollout.scripted import on_a_loop


def place_of(listener: TokenListener) -> tuple[str, int, bytes]:
    host, port, token = listener.variables["AREAL_LITE_CONNECTION"].split()
    return host, int(port), bytes.fromhex(token)


def until_closed(connection: socket.socket) -> bytes:
    """Return all that the other side sends before it closes."""
    with connection:
        try:
            return b"".join(iter(lambda: connection.recv(64), b""))
        except ConnectionResetError:
            return b""


@on_a_loop
async def test_the_program_with_the_token_is_connected_and_the_port_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = TokenListener("127.0.0.1")
    host, port, _ = place_of(listener)
    monkeypatch.setitem(os.environ, *next(iter(listener.variables.items())))
    theirs, ours = await asyncio.gather(asyncio.to_thread(connect), listener.accept())
    with ours, theirs:
        assert "AREAL_LITE_CONNECTION" not in os.environ  # what it starts cannot read the token
        assert theirs.gettimeout() is None
        assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in (ours, theirs))
        theirs.sendall(b"frame")
        assert await asyncio.get_running_loop().sock_recv(ours, 64) == b"frame"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))


@on_a_loop
async def test_strangers_are_turned_away_and_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = TokenListener("127.0.0.1")
    host, port, token = place_of(listener)
    accepting = asyncio.create_task(listener.accept())
    silent, short, wrong = (socket.create_connection((host, port)) for _ in range(3))
    short.sendall(token[:31])
    short.shutdown(socket.SHUT_WR)
    wrong.sendall(token[:31] + bytes([token[31] ^ 1]))
    for stranger in (short, wrong):
        assert await asyncio.to_thread(until_closed, stranger) == b""
    assert not accepting.done()
    monkeypatch.setitem(os.environ, *next(iter(listener.variables.items())))
    with await asyncio.to_thread(connect), await accepting:
        assert await asyncio.to_thread(until_closed, silent) == b""


@on_a_loop
async def test_a_connection_that_stays_silent_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_socket, "HELLO_S", 0.01)
    listener = TokenListener("127.0.0.1")
    accepting = asyncio.create_task(listener.accept())
    silent = socket.create_connection(place_of(listener)[:2])
    assert await asyncio.to_thread(until_closed, silent) == b""
    accepting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await accepting


def test_a_program_refuses_a_listener_that_lacks_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port, token = impostor.getsockname()[1], bytes(range(64))
        monkeypatch.setitem(os.environ, "AREAL_LITE_CONNECTION", f"127.0.0.1 {port} {token.hex()}")

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(connection.recv(32))  # all that it has seen of the token

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match=f"127.0.0.1:{port} is not the run that started this program"):
            connect()
        thread.join()
