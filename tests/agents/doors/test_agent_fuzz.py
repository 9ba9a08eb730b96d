"""Any bytes and any JSON: no server error, no other session's answer, no growing memory. `make fuzz` runs it all."""

from __future__ import annotations
import asyncio
import contextlib
import gc
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.doors.listener import Listener
from areal_lite.errors import ServerError
from tests.agents.doors.openapi import openapi
from tests.agents.doors.test_agent_service import call
from tests.agents.fuzz_requests import fuzz_request
from tests.agents.raw_http import HELLO, listening, new_session, request, send

SESSIONS = 20
CONNECTIONS = 40
TURNS_PER_SESSION = 100
"""Requests after which a session ends, as an episode does; its memory is then free."""
WORD = re.compile(rb"secret[0-9]+x")
MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": HELLO,
    "/v1/messages/count_tokens": HELLO,
    "/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "x"}]}]},
}


class Fuzzer:
    """Sends drawn requests from many connections at once and checks every byte that comes back."""

    def __init__(self, service: AgentService, listener: Listener, seed: int) -> None:
        self._service, self._listener = service, listener
        self._draw = random.Random(seed)
        self._opened = 0
        self._sessions = [self._open() for _ in range(SESSIONS)]
        self.statuses: Counter[int] = Counter()
        self.words = 0

    def _open(self) -> list[Any]:
        self._opened += 1
        word = f"secret{self._opened}x"
        answers = lambda _: ServerError("scripted") if self._draw.random() < 0.02 else word  # noqa: E731
        return [self._service.open(new_session(answers)), word, 0]

    async def run(self, count: int) -> None:
        """Send ``count`` requests."""
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await self._one()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONNECTIONS):
                tasks.create_task(worker())

    async def _one(self) -> None:
        index = self._draw.randrange(SESSIONS)
        session = self._sessions[index]
        session[2] += 1
        if session[2] > TURNS_PER_SESSION:
            self._service.close(session[0])
            session = self._sessions[index] = self._open()
        key, word, _ = session
        raw, is_answered = fuzz_request(self._draw, self._listener, key, word)
        received = await self._exchange(raw)
        assert not is_answered or received, raw
        for status in re.findall(rb"(?:^|(?<=[}\n]))HTTP/1\.[01] ([0-9]{3}) ", received):
            self.statuses[int(status)] += 1
            assert int(status) < 500 or (int(status) == 503 and b"scripted" in received), (raw, received)
        assert set(WORD.findall(received)) <= {word.encode()}, (raw, received)
        self.words += word.encode() in received
        assert b"Traceback" not in received

    async def _exchange(self, raw: bytes) -> bytes:
        """Send and half-close; return everything until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._listener.port)
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(raw)
                await writer.drain()
                received = b""
                while b"\r\n\r\n" not in received or not _is_complete(received):
                    async with asyncio.timeout(10):
                        if not (piece := await reader.read(65536)):
                            break
                    received += piece
                return received
            return b""
        finally:
            writer.close()


def _is_complete(received: bytes) -> bool:
    """Return whether the first response has arrived."""
    head, _, body = received.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100 "):
        return False
    if b"chunked" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    length = re.search(rb"content-length: ([0-9]+)", head.lower())
    return length is None or len(body) >= int(length[1]) or head.startswith(b"HTTP/1.1 405")


def resident_mib() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss / 2**20)


def test_the_description_names_the_fields_that_the_apis_read() -> None:
    paths = openapi()["paths"]
    stored = {"/v1/responses/{id}", "/v1/responses/{id}/input_items"}
    assert set(paths) == {*MINIMAL, *stored, "/v1/models"}
    for path, body in MINIMAL.items():
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(body) <= set(schema["properties"])
        for name in schema["properties"]:
            assert call({name: None, **body}, path=path)[0] == 200, (path, name)
        status, answer = call({**body, "no_such_field": 1}, path=path)
        assert status == 400 and "no_such_field" in answer["error"]["message"]


def test_raw_requests_get_no_server_error_and_no_other_session_answers() -> None:
    async def run() -> None:
        service = AgentService()
        async with listening(service, request_timeout_s=2) as listener:
            fuzzer = Fuzzer(service, listener, seed=0)
            await fuzzer.run(500)
            assert fuzzer.statuses[200] > 50 and fuzzer.statuses[400] > 50 and fuzzer.words > 30
            key = service.open(new_session(["fine"]))
            assert (await send(listener, request(listener, key)))[0].status == 200

    asyncio.run(run())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["open", "ask", "ask", "ask", "end", "guess"]), st.integers(0, 3)), max_size=20)
)
def test_sessions_answer_to_their_own_key_alone_until_they_end(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        service, asked = AgentService(), Counter[str]()

        def answers(word: str) -> Callable[[Any], str]:
            return lambda _: asked.update([word]) or word

        keys, ended = list[str](), set[str]()
        for number, (step, which) in enumerate(steps):
            key = keys[which % len(keys)] if keys else ""
            if step == "open":
                keys.append(service.open(new_session(answers(f"secret{len(keys)}x"))))
            elif step == "end" and key and key not in ended:
                service.close(key)
                ended.add(key)
            else:
                key = key[:-1] + "_" if step == "guess" else key
                expected = 401 if key not in keys else 410 if key in ended else 200
                before = asked.total()
                body = json.dumps({"messages": [{"role": "user", "content": f"step {number}"}]}).encode()
                reply = await service.handle("POST", "/v1/chat/completions", {"authorization": f"Bearer {key}"}, body)
                assert isinstance(reply.body, bytes)
                own = {f"secret{keys.index(key)}x".encode()} if expected == 200 else set()
                assert (reply.status, set(WORD.findall(reply.body))) == (expected, own)
                assert asked.total() == before + (expected == 200)

    asyncio.run(run())


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1])
def test_20_000_raw_requests_leave_memory_flat(seed: int) -> None:
    async def run() -> None:
        service = AgentService()
        async with listening(service, request_timeout_s=0.5) as listener:
            fuzzer = Fuzzer(service, listener, seed)
            await fuzzer.run(10_000)
            half = resident_mib()
            await fuzzer.run(10_000)
            grown = resident_mib() - half
            print(f"statuses {dict(fuzzer.statuses)}, secrets seen {fuzzer.words}, grown {grown:.1f} MiB")
            assert grown < 8

    asyncio.run(run())


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_3_000_cases_of_the_description_get_no_server_error() -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import openapi as schemathesis_openapi

    started, stopped = threading.Event(), threading.Event()
    address: list[str] = []

    async def serve() -> None:
        service = AgentService()
        async with listening(service) as listener:
            address.extend([f"http://127.0.0.1:{listener.port}", service.open(new_session(lambda _: "hi"))])
            started.set()
            await asyncio.to_thread(stopped.wait)

    server = threading.Thread(target=lambda: asyncio.run(serve()))
    server.start()
    try:
        assert started.wait(30)
        url, key = address
        description = openapi()
        del description["security"]  # else many cases carry a drawn key
        schema = schemathesis_openapi.from_dict(description)
        operations = [one.ok() for one in schema.get_all_operations() if one.ok().method == "post"]
        statuses: Counter[int] = Counter()
        for operation in operations:

            @settings(
                max_examples=3000 // len(operations),
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def check(case: Any) -> None:
                reply = case.call(base_url=url, headers={"Authorization": f"Bearer {key}"})
                statuses[reply.status_code] += 1
                assert reply.status_code < 500, (case.body, reply.text)

            check()
        print(f"statuses {dict(statuses)}")
        assert statuses[200] > 1000 and not statuses[401]
    finally:
        stopped.set()
        server.join()
