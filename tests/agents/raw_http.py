"""Raw HTTP over a socket: what no HTTP library would send."""

from __future__ import annotations
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from areal_lite.agents.doors.agent_service import MAX_BODY_BYTES, AgentService
from areal_lite.agents.doors.listener import Listener
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.processes.http_limits import HttpLimits
from tests.agents.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Answered(NamedTuple):
    """One HTTP response."""

    status: int
    head: str
    body: bytes

    @property
    def error(self) -> str:
        """The message of an error, in OpenAI's or Anthropic's form."""
        return str(json.loads(self.body)["error"]["message"])


def new_session(answers: Any) -> ChatSession:
    """Return a session of a scripted engine."""
    engine = ScriptedEngine(answers)
    return ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters(max_new_tokens=64))  # type: ignore[arg-type]


@asynccontextmanager
async def listening(service: AgentService, **options: Any) -> AsyncIterator[Listener]:
    """Serve ``service`` on a socket."""
    listener = Listener(service, HttpLimits(max_body_bytes=MAX_BODY_BYTES, **options))
    await listener.open()
    try:
        yield listener
    finally:
        await listener.close()


def request(
    listener: Listener,
    key: str = "",
    *,
    method: str = "POST",
    path: str = CHAT,
    body: bytes | None = None,
    **headers: str | None,
) -> bytes:
    """Return a request's bytes; a header of None is left out."""
    body = json.dumps(HELLO).encode() if body is None and method == "POST" else body or b""
    lines: dict[str, str | None] = {
        "Host": f"127.0.0.1:{listener.port}",
        "Authorization": f"Bearer {key}" if key else None,
        "Content-Type": "application/json" if body else None,
        "Content-Length": str(len(body)) if body or method == "POST" else None,
        **{name.replace("_", "-").title(): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape") + body


async def send(listener: Listener, *parts: bytes) -> list[Answered]:
    """Send bytes on one connection; return all responses until it closes or no further one comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        if parts[0].startswith(b"HEAD "):
            return [await _read_head(reader)]
        return await read_all(reader, at_most=1 if len(parts) == 1 else 1000)
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> Answered:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    return Answered(int(head.split(" ", 2)[1]), head, await reader.read())


async def read_all(reader: asyncio.StreamReader, *, at_most: int) -> list[Answered]:
    """Return the responses until the connection closes, ``at_most`` of them."""
    answered = []
    while len(answered) < at_most and (one := await read_one(reader)) is not None:
        if one.status != 100:
            answered.append(one)
    return answered


async def read_one(reader: asyncio.StreamReader) -> Answered | None:
    """Return the next response; None if the connection closed."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(head.split(" ", 2)[1])
        headers = dict(line.lower().split(": ", 1) for line in head.strip().split("\r\n")[1:])
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return Answered(status, head, body)
