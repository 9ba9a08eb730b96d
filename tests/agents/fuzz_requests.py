"""Broken and hostile requests, drawn with a seed."""

from __future__ import annotations
import json
import random
from areal_lite.agents.doors.listener import Listener
from tests.agents.raw_http import CHAT, request

GEMINI = "/v1beta/models/m:streamGenerateContent?alt=sse"
PATHS = [
    CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", GEMINI, "/v1/models", "/",
    "/v1/responses/x", "/v1/responses//input_items?order=asc", "/v1/responses/%00?",
    "*", "/v1/../v1/models", "//v1/models", "/v1/%6dodels", "/s/", "/s//v1/models", "/s/x/../../v1/models",
]  # fmt: skip
METHODS = [
    "POST",
    "POST",
    "POST",
    "GET",
    "HEAD",
    "OPTIONS",
    "PUT",
    "DELETE",
    "CONNECT",
    "TRACE",
    "PRI",
    "post",
]
HEADERS = [
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Content-Length: 3", b"Content-Length: x",
    b"Expect: 100-continue", b"Connection: close", b"Connection: Upgrade", b"Upgrade: websocket", b"Upgrade: h2c",
    b"Origin: http://evil.example", b"Host: evil.example", b"Content-Encoding: gzip", b"Content-Type: text/plain",
    b"X-Api-Key: al_\xff\xfe", b"Authorization: Basic eDp4", b"A: " + b"x" * 9000, b"B: \x00", b" folded: x",
    b"Range: bytes=0-1", b"Cookie: a=b", b"Accept: text/html", b"Accept-Encoding: gzip, br", b"X-Forwarded-Host: x",
]  # fmt: skip


def fuzz_request(draw: random.Random, listener: Listener, key: str, word: str) -> tuple[bytes, bool]:
    """Return raw bytes to send on a connection, and whether all of them can be answered.

    Args:
        draw: Source of all choices.
        listener: Where they will be sent.
        key: A valid key.
        word: Secret of the session, part of some prompts.
    """
    kind = draw.randrange(10)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 400)), False
    raw = _valid(draw, listener, key, word)
    if kind <= 3:
        return raw, True
    if kind == 4:  # cut off
        return raw[: draw.randrange(1, len(raw))], False
    if kind == 5:  # some bytes flipped
        changed = bytearray(raw)
        for _ in range(draw.randrange(1, 8)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        return bytes(changed), False
    if kind == 6:  # a wrong length
        right = int(raw.partition(b"Content-Length: ")[2].partition(b"\r")[0] or 0)
        wrong = b"Content-Length: %d" % max(0, right + draw.randrange(-20, 20))
        return raw.replace(b"Content-Length: %d" % right, wrong), False
    if kind == 7:  # pipelined
        return b"".join(_valid(draw, listener, key, word) for _ in range(draw.randrange(2, 5))), False
    if kind == 8:  # odd headers
        head, _, body = raw.partition(b"\r\n")
        extra = b"\r\n".join(draw.choices(HEADERS, k=draw.randrange(1, 4)))
        return head + b"\r\n" + extra + b"\r\n" + body, False
    line = f"{draw.choice(METHODS)} {draw.choice(PATHS)} HTTP/{draw.choice(['1.1', '1.0', '0.9', '2.0'])}\r\n"
    many = b"".join(b"X-%d: %d\r\n" % (i, i) for i in range(draw.choice([1, 10, 150, 3000])))
    return line.encode() + many + raw.partition(b"\r\n")[2], False


def _valid(draw: random.Random, listener: Listener, key: str, word: str) -> bytes:
    """Return a request that is valid HTTP; its JSON may make no sense."""
    place = draw.randrange(3)
    path = draw.choice(PATHS[:7])
    method = "GET" if path == "/v1/models" else "POST"
    body = json.dumps(_body(draw, path, word)).encode() if method == "POST" else b""
    if place == 0:
        path = f"/s/{key}{path}"
    return request(
        listener,
        key if place == 1 else "",
        method=method,
        path=path,
        body=body,
        x_api_key=key if place == 2 else None,
    )


def _body(draw: random.Random, path: str, word: str) -> object:
    if draw.random() < 0.2:
        return _json(draw, 4)
    text = word + draw.choice([" hello", " ünï🙂", "", " <tool_call>", " \x00"])
    conversation = [{"role": draw.choice(["user", "assistant", "system", "tool"]), "content": text}]
    body: dict[str, object] = {"model": "m", "stream": draw.random() < 0.3, "max_tokens": 8}
    if path == "/v1/responses":
        body = {"model": "m", "stream": body["stream"], "input": draw.choice([text, conversation])}
    elif path == GEMINI:
        contents = [{"role": draw.choice(["user", "model", "x"]), "parts": [{"text": text}, _json(draw, 2)]}]
        body = {
            "contents": contents[: draw.randrange(2)] + [{"parts": [{"text": text}]}],
            "generationConfig": {"maxOutputTokens": 8},
        }
    elif path == "/v1/completions":
        body["prompt"] = draw.choice([text, [1, 2, 3]])
    else:
        body["messages"] = conversation * draw.choice([1, 1, 2, 40])
    if path == CHAT and draw.random() < 0.3:
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    if draw.random() < 0.3:
        body[draw.choice([*body, "temperature", "stop", "seed", "n", "logprobs", "tools", "x"])] = _json(draw, 3)
    return body


def _json(draw: random.Random, depth: int) -> object:
    kind = draw.randrange(9 if depth else 6)
    if kind == 6:
        return [_json(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind >= 7:
        return {draw.choice(["role", "content", "type", "text", "name", "a"]): _json(draw, depth - 1) for _ in range(3)}
    return [
        None,
        True,
        draw.randrange(-(2**63), 2**63),
        draw.random() * 1e300,
        "",
        "x" * draw.randrange(2000),
    ][kind]
