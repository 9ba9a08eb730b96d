"""What a hostile agent, a browser and a broken client cannot do to the agents' service and the embedded server."""

from __future__ import annotations
import asyncio
import json
import logging
from pathlib import Path
from typing import Any
import aiohttp
import pytest
from areal_lite.agents.doors.agent_service import MAX_BODY_BYTES, AgentService
from areal_lite.agents.doors.listener import Listener
from areal_lite.processes.browser_guard import loopback_names, refusal_of
from areal_lite.processes.http_limits import HttpLimits
from tests.agents.raw_http import CHAT, HELLO, Answered, listening, new_session, read_one, request, send
from tests.agents.scripted_engine import ScriptedEngine
from tests.embedded.serving import serving
from tests.fixtures.tiny_model import build_tiny_model

FINE: Any = lambda _: "fine"  # noqa: E731


def answer(answers: Any = FINE, **change: Any) -> Answered:
    """Return the response to one request with a valid key."""

    async def run() -> Answered:
        service = AgentService()
        key = service.open(new_session(answers))
        async with listening(service) as listener:
            change["path"] = change.get("path", CHAT).replace("KEY", key)
            (answered,) = await send(listener, request(listener, change.pop("key", key), **change))
            return answered

    return asyncio.run(run())


@pytest.mark.parametrize(
    "path",
    [
        "/s/KEY/../s/OTHER/v1/models",
        "/s/KEY/%2e%2e/s/OTHER/v1/models",
        "/s/KEY/..%2fs%2fOTHER%2fv1%2fmodels",
        "/s/KEY//v1/models",
        "//s/KEY/v1/models",
        "/s/KEY/v1/../v1/models",
        "/s/KEY/./v1/models",
        "/s/KEY/v1/%6dodels",
        "/s/KEY/v1/models/",
        "/s/KEY/v1/models;x=1",
        "/s/KEY\\v1\\models",
        "/s/KEY/s/OTHER/v1/models",
        "http://127.0.0.1/s/OTHER/v1/models",
    ],
)
def test_a_path_reaches_its_own_session_and_nothing_else(path: str) -> None:
    async def run() -> None:
        service = AgentService()
        mine, other = service.open(new_session(["mine"])), service.open(new_session(["other"]))
        async with listening(service) as listener:
            where = path.replace("KEY", mine).replace("OTHER", other)
            (got,) = await send(listener, request(listener, method="GET", path=where))
            assert got.status in (400, 401, 404) and got.error
            assert b'"data"' not in got.body
            (got,) = await send(listener, request(listener, method="GET", path=f"/s/{mine}/v1/models?x=/../"))
            assert got.status == 200

    asyncio.run(run())


def test_the_key_of_an_ended_episode_gets_410_in_every_place_of_the_key() -> None:
    async def run() -> None:
        service = AgentService()
        key = service.open(new_session(["never"]))
        service.close(key)
        async with listening(service) as listener:
            for raw in (
                request(listener, key),
                request(listener, x_api_key=key),
                request(listener, path=f"/s/{key}{CHAT}"),
                request(listener, key, method="GET", path="/v1/models", body=b""),
            ):
                (got,) = await send(listener, raw)
                assert got.status == 410 and "has ended" in got.error

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (200, {}),
        (200, {"host": "LOCALHOST:1"}),
        (200, {"host": "[::1]:80"}),
        ((400, 403), {"host": None}),
        (403, {"host": ""}),
        (403, {"host": "evil.example"}),
        (403, {"host": "127.0.0.1.evil.example"}),
        (403, {"host": "[::1"}),
        (403, {"host": "[fe80::1]:80"}) ,
        (403, {"host": "evil.example:80@127.0.0.1"}),
        (403, {"origin": "http://127.0.0.1"}),
        (403, {"origin": "null"}),
        (403, {"sec_fetch_site": "same-site"}),
        (200, {"sec_fetch_site": "none"}),
        (200, {"content_type": "application/json; charset=utf-8"}),
        (200, {"content_type": "Application/JSON ;charset=utf-8"}),
        (415, {"content_type": None}),
        (415, {"content_type": "text/plain"}),
        (415, {"content_type": "text/plain; application/json"}),
        (415, {"content_type": "application/jsonp"}),
        (415, {"content_type": "multipart/form-data"}),
        (415, {"content_encoding": "gzip"}),
        (200, {"content_encoding": "identity"}),
        (405, {"method": "HEAD"}),
        (405, {"method": "OPTIONS"}),
        (405, {"method": "PUT"}),
        (405, {"method": "DELETE", "path": "/v1/models"}),
        ((400, 405), {"method": "BREW"}),
        (401, {"key": "al_\udcff\udcfe"}),
        (401, {"authorization": "Basic al_x"}),
        (404, {"path": "/metrics"}),
    ],
)  # fmt: skip
def test_requests_of_programs_are_answered_and_all_others_refused(
    status: int | tuple[int, ...], change: dict[str, Any]
) -> None:
    got = answer(**change)
    assert got.status in (status if isinstance(status, tuple) else (status,)), got
    assert "access-control" not in got.head.lower()
    if status != 200 and change.get("method") != "HEAD":
        assert got.error and "content-type: application/json" in got.head.lower()


def test_a_preflight_request_is_refused() -> None:
    got = answer(method="OPTIONS", origin="http://evil.example", access_control_request_method="POST")
    assert got.status == 405 and "access-control" not in got.head.lower()


def test_errors_have_the_form_of_the_api_they_are_sent_to() -> None:
    for path in ("/v1/messages", "/s/KEY/v1/messages"):
        assert json.loads(answer(path=path, content_type="text/plain").body)["type"] == "error"
    assert set(json.loads(answer(content_type="text/plain").body)["error"]) == {
        "message", "type", "param", "code",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "raw"),
    [
        ((431,), b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 20_000 + b"\r\n\r\n"),
        ((431,), b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        ((400, 431), b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5_000 + b"\r\n"),
        ((400,), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
        ((400,), b"GET / HTTP/9.9\r\n\r\n"),
        ((400,), b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n"),
        ((400,), b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n"),
        ((400,), b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ((400,), b"GET / HTTP/1.1\r\nHost: x\r\nBad Name: x\r\n\r\n"),
        ((400,), b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n"),
    ],
)
def test_what_is_not_http_gets_a_json_error(statuses: tuple[int, ...], raw: bytes) -> None:
    async def run() -> None:
        async with listening(AgentService()) as listener:
            (got,) = await send(listener, raw)
            assert got.status in statuses and got.error
            assert "content-type: application/json" in got.head.lower()

    asyncio.run(run())


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def test_chunked_bodies_are_served_and_limited_as_they_arrive() -> None:
    async def run() -> None:
        service = AgentService()
        key = service.open(new_session(["fine"]))
        async with listening(service) as listener:
            head = request(
                listener, key, body=b"x", content_length=None, transfer_encoding="chunked"
            )[:-1]  # fmt: skip
            body = json.dumps(HELLO).encode()
            (got,) = await send(listener, head + chunked(body[:9], body[9:]))
            assert got.status == 200
            half = b" " * (MAX_BODY_BYTES // 2 + 1)
            (got,) = await send(listener, head + chunked(half, half))
            assert got.status == 413 and "more than" in got.error
            (got,) = await send(listener, head + b"zz\r\n")
            assert got.status == 400

    asyncio.run(run())


def test_a_body_is_announced_before_it_is_sent() -> None:
    async def run() -> None:
        service = AgentService()
        key = service.open(new_session(["fine"]))
        async with listening(service) as listener:
            raw = request(listener, key, expect="100-continue")
            head, _, body = raw.partition(b"\r\n\r\n")
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(head + b"\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()

    asyncio.run(run())


def test_slow_clients_are_cut_off_while_quick_ones_are_served() -> None:
    async def run() -> None:
        service = AgentService()
        key = service.open(new_session(FINE))
        async with listening(service, request_timeout_s=0.2) as listener:
            raw = request(listener, key)
            head_end = raw.index(b"\r\n\r\n") + 4
            silent, half_head, half_body = await asyncio.gather(
                *(asyncio.open_connection("127.0.0.1", listener.port) for _ in range(3))
            )
            half_head[1].write(raw[: head_end - 2])
            half_body[1].write(raw[: head_end + 5])
            (got,) = await send(listener, raw)
            assert got.status == 200
            async with asyncio.timeout(5):
                assert await silent[0].read() == b""
                assert await half_head[0].read() == b""
                late = await half_body[0].read()
            assert late.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.2 s" in late
            for _, writer in (silent, half_head, half_body):
                writer.close()

    asyncio.run(run())


def test_a_slow_answer_is_not_a_slow_client() -> None:
    class Slow(ScriptedEngine):
        async def agenerate(self, req: Any) -> Any:
            await asyncio.sleep(0.3)
            return await super().agenerate(req)

    async def run() -> None:
        service = AgentService()
        session = new_session([])
        session.engine = Slow(["fine"])  # type: ignore[assignment]
        key = service.open(session)
        async with listening(service, request_timeout_s=0.1) as listener:
            (got,) = await send(listener, request(listener, key))
            assert got.status == 200

    asyncio.run(run())


def test_connections_over_the_limit_are_refused_and_later_ones_served() -> None:
    async def run() -> None:
        service = AgentService()
        key = service.open(new_session(FINE))
        async with listening(service, max_connections=2) as listener:
            raw = request(listener, key)
            opened = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(2)]
            await asyncio.sleep(0.05)
            (got,) = await send(listener, raw)
            assert got.status == 503 and "too many connections" in got.error
            for reader, writer in opened:
                writer.write(raw)
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                writer.close()
            async with asyncio.timeout(5):
                while (await send(listener, raw))[0].status != 200:  # until the server saw them close
                    pass

    asyncio.run(run())


def test_a_client_that_hangs_up_ends_its_generation_without_a_stream() -> None:
    async def run() -> None:
        started, ended = asyncio.Event(), asyncio.Event()

        class Endless(ScriptedEngine):
            async def agenerate(self, req: Any) -> Any:
                try:
                    started.set()
                    await asyncio.Event().wait()
                finally:
                    ended.set()

        service = AgentService()
        session = new_session([])
        session.engine = Endless([])  # type: ignore[assignment]
        key = service.open(session)
        async with listening(service) as listener, asyncio.timeout(5):
            _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(request(listener, key))
            await started.wait()
            writer.close()
            await ended.wait()

    asyncio.run(run())


def test_no_log_and_no_reply_contains_a_key(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        service = AgentService()
        key = service.open(new_session([RuntimeError("bug"), *["fine"] * 9]))
        async with listening(service, request_timeout_s=0.2) as listener:
            for raw in (
                request(listener, key),
                request(listener, key),
                request(listener, path=f"/s/{key}{CHAT}"),
                request(listener, path=f"/s/{key}/nowhere"),
                request(listener, key, body=b"{"),
                request(listener, key, host=key),
                request(listener, key + "x" * 9000),
                request(listener, key, content_type=f"text/{key}x"),
                request(listener, key).replace(b"Authorization", b"Bad Name"),
                f"{key} / HTTP/1.1\r\n\r\n".encode(),
                request(listener, key)[:-5],
            ):
                for got in await send(listener, raw):
                    if key.encode() in raw.partition(b"\r\n\r\n")[0].replace(b"Bearer " + key.encode(), b""):
                        continue  # the client put its key where an error quotes it
                    assert key.encode() not in got.body + got.head.encode()
            service.close(key)
            await send(listener, request(listener, key))
        assert key not in caplog.text and key not in repr(vars(service))

    with caplog.at_level(logging.DEBUG):
        asyncio.run(run())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.3.3.3"])
def test_a_server_on_loopback_takes_loopback_hosts(host: str) -> None:
    names = loopback_names(host)
    for given in ("127.0.0.1:1", "LocalHost", "[::1]:1", f"[{host}]:2" if ":" in host else f"{host}:2"):
        assert refusal_of({"Host": given}, has_body=False, host_names=names) is None
    assert refusal_of({"Host": "evil"}, has_body=False, host_names=names) is not None


def test_a_server_on_the_network_takes_any_host() -> None:
    assert loopback_names("0.0.0.0") == loopback_names("::") == loopback_names("node7") == frozenset()
    assert refusal_of({"Host": "node7:1"}, has_body=False, host_names=frozenset()) is None
    assert refusal_of({"Host": "node7:1", "Origin": "x"}, has_body=False, host_names=frozenset()) is not None


def test_a_web_page_cannot_use_the_embedded_server(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path, seed=0)
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}).encode()

    async def run() -> None:
        async with serving(model) as client:
            for status, method, path, headers in (
                (200, "POST", "/generate", {}),
                (200, "POST", "/generate", {"Content-Type": "application/json; charset=utf-8"}),
                (415, "POST", "/generate", {"Content-Type": "text/plain"}),
                (415, "POST", "/abort_request", {"Content-Type": "application/x-www-form-urlencoded"}),
                (403, "POST", "/generate", {"Origin": "http://evil.example"}),
                (403, "POST", "/pause_generation", {"Host": "evil.example"}),
                (403, "GET", "/flush_cache", {"Sec-Fetch-Site": "cross-site"}),
                (403, "GET", "/server_info", {"Host": "rebound.example:30000"}),
            ):
                data = body if method == "POST" else None
                async with client.session.request(method, path, data=data, headers=headers) as reply:
                    assert reply.status == status, path
                    assert reply.content_type == "application/json"
                    assert not any(name.lower().startswith("access-control") for name in reply.headers)
            async with (
                aiohttp.ClientSession(client.session._base_url) as plain,
                plain.post("/flush_cache") as reply,
            ):
                assert reply.status == 200  # no body, so no content type

    asyncio.run(run())


def test_the_embedded_server_cuts_off_slow_clients_and_waits_for_slow_answers(tmp_path: Path) -> None:
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}).encode()
    head = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    limits = HttpLimits(max_body_bytes=10_000, request_timeout_s=0.5)

    async def run() -> None:
        async with serving(build_tiny_model(tmp_path, seed=0), limits=limits) as client, asyncio.timeout(20):
            assert (await client.call("/pause_generation", {}))[0] == 200
            slow_answer = asyncio.create_task(client.call("/generate", json.loads(body)))

            async def until_closed(sent: bytes) -> bytes:
                reader, writer = await asyncio.open_connection(*client.address.split(":"))
                writer.write(sent)
                reply = await reader.read()
                writer.close()
                return reply

            late = await asyncio.gather(
                until_closed(b""),
                until_closed(b"POST /generate HTTP/1.1\r\n" + head[:-2]),
                until_closed(b"POST /generate HTTP/1.1\r\n" + head + body[:5]),
                until_closed(b"POST /nowhere HTTP/1.1\r\n" + head + body[:5]),
                until_closed(b"POST /flush_cache HTTP/1.1\r\n" + head + body[:5]),  # reads no body
                until_closed(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),  # idle after a reply
            )
            assert [one[9:12] for one in late] == [b"", b"", b"408", b"404", b"200", b"200"]
            assert b"did not arrive within 0.5 s" in late[2]
            assert (await client.call("/generate", raw=b" " * 10_001))[0] == 413
            assert not slow_answer.done()
            assert (await client.call("/continue_generation", {}))[0] == 200
            assert (await slow_answer)[0] == 200

    asyncio.run(run())


def test_the_embedded_server_refuses_connections_over_the_limit_and_serves_later_ones(tmp_path: Path) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    limits = HttpLimits(max_body_bytes=10_000, max_connections=2)

    async def run() -> None:
        async with serving(build_tiny_model(tmp_path, seed=0), limits=limits) as client, asyncio.timeout(20):
            address = client.address.split(":")
            opened = [await asyncio.open_connection(*address) for _ in range(2)]
            for reader, writer in opened:
                writer.write(health)
                assert (await read_one(reader)).status == 200  # type: ignore[union-attr]
            surplus, unused = await asyncio.open_connection(*address)
            refused = await read_one(surplus)
            assert refused is not None and refused.status == 503 and "too many connections" in refused.error
            assert await surplus.read() == b""
            for _, writer in (*opened, (surplus, unused)):
                writer.close()
            later = None
            while later is None or later.status != 200:  # until the server saw them close
                reader, writer = await asyncio.open_connection(*address)
                writer.write(health)
                later = await read_one(reader)
                writer.close()

    asyncio.run(run())


def test_the_listener_is_bound_to_loopback() -> None:
    async def run() -> None:
        async with listening(AgentService()) as listener:
            assert isinstance(listener, Listener) and listener._runner is not None
            assert [address[0] for address in listener._runner.addresses] == ["127.0.0.1"]

    asyncio.run(run())
