"""Streamed answers: the receiver gets each token once, whatever happens to chunks, connections and requests."""

from __future__ import annotations
import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig, ModelRequest, ModelResponse
from areal_lite.api import episode_context as context
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.errors import ConfigError, ServerError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.client import engine_client, request_sender
from areal_lite.servers.client.answer import Answer
from areal_lite.servers.client.engine_client import EngineClient
from areal_lite.servers.dialects import Dialect, dialect_of
from areal_lite.servers.dialects.dialect import BadResponse, Chunk, ErrorReply, GenerationCall, ServerInfo, ServerLimits
from areal_lite.servers.dialects.reply_reader import ReplyReader
from areal_lite.servers.dialects.sglang import SGLang
from areal_lite.servers.dialects.vllm import VLLM
from areal_lite.servers.pool.server_pool import Server
from areal_lite.servers.weights.published_weights import WeightFolder
from tests.fixtures.engines import generation_call
from tests.stub_server import StubThread, answer_tokens

FIXTURES = Path(__file__).parents[2] / "fixtures"
PROMPT = [3, 1, 4]
LENGTH = 12
"""Tokens of a whole answer; the last ends it."""


def next_token(ids: Sequence[int]) -> tuple[int, float]:
    """Return the token that follows ``ids`` and its log-prob: the server's whole model."""
    return (sum(ids) * 31 + len(ids)) % 97, -(sum(ids) % 50) / 64


def truth() -> tuple[list[int], list[float]]:
    ids, logprobs = list(PROMPT), []
    for _ in range(LENGTH):
        token, logprob = next_token(ids)
        ids.append(token)
        logprobs.append(logprob)
    return ids[len(PROMPT) :], logprobs


def cuts(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """Cut ``data`` into pieces of these sizes, again and again."""
    start = 0
    for size in itertools.cycle(sizes):
        if start >= len(data):
            return
        yield data[start : start + size]
        start += size


Fate = tuple[str, int]
"""How one request ends and after how many tokens: finish, abort, reset, end, garbage, error or refuse."""


class ScriptedServer:
    """A raw HTTP server: bytes are cut where the script says, and connections break in the middle of an event."""

    def __init__(self, backend: str, fates: Sequence[Fate] = (), sizes: Sequence[int] = (10_000,)) -> None:
        self.backend = backend
        self.fates = list(fates)
        self.sizes = sizes
        self.bodies: list[dict[str, Any]] = []
        self.control: list[tuple[str, Any]] = []
        self.closed = asyncio.Event()
        """Set when a client closes its connection in the middle of an answer."""
        self.hold: asyncio.Event | None = None
        """Answers wait for this after their first token."""
        self.incremental = False
        self.aborted = asyncio.Event()
        self.connections: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        try:
            while await self.serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.connections.discard(task)

    async def serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return whether the connection still stands."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        method, path, _ = head.split(" ", 2)
        lengths = [int(line.split(":")[1]) for line in head.split("\r\n") if "content-length" in line]
        body = orjson.loads(await reader.readexactly(lengths[0])) if lengths else None
        if path in ("/generate", "/inference/v1/generate"):
            self.bodies.append(body)
            return await self.answer(body, reader, writer)
        if method == "post":
            self.control.append((path, body))
            if "abort_request" in path:
                self.aborted.set()
        writer.write(_response(b"{}"))
        return True

    async def answer(self, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection still stands."""
        fate, count = self.fates.pop(0) if self.fates else ("finish", LENGTH)
        if fate == "refuse":
            writer.write(_response(b'{"error": {"message": "busy"}}', "503 Unavailable"))
            return True
        ids = body["input_ids" if self.backend != "vllm" else "token_ids"]
        sampling = body["sampling_params"]
        left = sampling["max_new_tokens" if self.backend != "vllm" else "max_tokens"]
        count = left if fate == "finish" else min(count, left)
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(count):
            token, logprob = next_token([*ids, *tokens])
            tokens.append(token)
            logprobs.append(logprob)
        events = list(self.events(tokens, logprobs, "length" if fate == "finish" else fate))
        if not body["stream"]:
            if fate not in ("finish", "abort"):
                return False
            writer.write(_response(events[-2].removeprefix(b"data: ")))  # before [DONE]
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if self.hold is not None:
            self._write(writer, events[0])
            gone = asyncio.ensure_future(reader.read(1))
            waits = [gone, *(asyncio.ensure_future(event.wait()) for event in (self.hold, self.aborted))]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if gone.done() and not gone.cancelled():
                self.closed.set()
                return False
            events = list(self.events(tokens[:1], logprobs[:1], "abort"))[1:] if self.aborted.is_set() else events[1:]
        data = b"".join(events)
        if fate == "reset":  # in the middle of the next event
            data += b'data: {"meta_in'
        for part in cuts(data, self.sizes):
            self._write(writer, part)
            await asyncio.sleep(0)
        if fate == "reset":
            writer.close()
            return False
        writer.write(b"0\r\n\r\n")
        return True

    def _write(self, writer: asyncio.StreamWriter, part: bytes) -> None:
        writer.write(b"%x\r\n" % len(part) + part + b"\r\n")

    def events(self, tokens: list[int], logprobs: list[float], fate: str) -> Iterator[bytes]:
        whole = self.sglang if self.backend != "vllm" else self.vllm
        steps = range(1, len(tokens) + 1)
        ends = fate in ("length", "abort")
        for i in steps[:-1] if ends else steps:
            yield _event(whole(tokens[:i], logprobs[:i], None))
        if ends:
            yield _event(whole(tokens, logprobs, fate))
            yield b"data: [DONE]\n\n"
        elif fate == "garbage":
            yield b"data: {oops\n\n"
        elif fate == "error":
            yield _event({"error": {"message": "out of memory", "code": 500}})

    def sglang(self, tokens: list[int], logprobs: list[float], finish: str | None) -> dict[str, Any]:
        first = len(tokens) - 1 if self.incremental else 0
        pairs = [[p, t, None] for p, t in zip(logprobs, tokens, strict=True)][max(first, 0) :]
        meta = {
            "finish_reason": None if finish is None else {"type": finish},
            "completion_tokens": len(tokens),
            "output_token_logprobs": pairs,
            "weight_version": "7",
        }
        if finish:
            meta["weight_versions"] = [{"version": "7", "start": 0, "end": len(tokens)}] if tokens else []
        return {"output_ids": [t for _, t, _ in pairs], "meta_info": meta}

    def vllm(self, tokens: list[int], logprobs: list[float], finish: str | None) -> dict[str, Any]:
        content = [{"logprob": p} for p in logprobs[-1:]]
        spans = [{"version": "7", "start": 0, "end": len(tokens)}] if finish and tokens else None
        choice = {"token_ids": tokens[-1:], "logprobs": {"content": content}}
        return {"choices": [choice | {"weight_versions": spans, "finish_reason": finish}]}


def _response(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


@contextlib.asynccontextmanager
async def connected(server: ScriptedServer, **config: Any) -> AsyncIterator[EngineClient]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    client = EngineClient(
        InferenceEngineConfig(**{"backend": server.backend, "addresses": [address], "request_retries": 60} | config)
    )
    try:
        await client.open()
        client.requests.version = 7  # that of the server's tokens
        yield client
    finally:
        await client.close()
        listener.close()
        await asyncio.gather(*server.connections)


@pytest.fixture(autouse=True)
def _no_pauses() -> Iterator[None]:
    """Retries wait for random times; here they wait for none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_sender, "random", SimpleNamespace(uniform=lambda low, high: 0.0))
        yield


class Receiver:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.calls = 0

    def __call__(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.calls += 1


def request(on_tokens: Callable[..., None] | None = None, *, top_logprobs: int = 0, **sampling: Any) -> ModelRequest:
    gconfig = GenerationHyperparameters(**{"max_new_tokens": LENGTH} | sampling)
    return ModelRequest(input_ids=list(PROMPT), gconfig=gconfig, on_tokens=on_tokens, top_logprobs=top_logprobs)


fates = st.lists(
    st.tuples(
        st.sampled_from(["abort", "reset", "end", "garbage", "error", "refuse"]),
        st.integers(1, 4),
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    backend=st.sampled_from(["sglang", "embedded", "vllm"]),
    script=fates,
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    recorded=st.integers(0, LENGTH),
    incremental=st.booleans(),
)
def test_the_receiver_gets_exactly_the_final_tokens(
    backend: str, script: list[Fate], sizes: list[int], recorded: int, incremental: bool
) -> None:
    """Over chunks of any size, aborts, broken connections, garbage, errors, refusals and a recorded beginning."""
    tokens, logprobs = truth()

    async def run() -> tuple[ModelResponse, Receiver, ScriptedServer]:
        server, receiver = ScriptedServer(backend, script, sizes), Receiver()
        server.incremental = incremental
        episode = Episode()
        if recorded:
            episode.record(
                ModelResponse(
                    input_tokens=PROMPT,
                    output_tokens=tokens[:recorded],
                    output_logprobs=logprobs[:recorded],
                    output_versions=[7] * recorded,
                    stop_reason="abort",
                )
            )
        async with connected(server) as client:
            context.enter(EpisodeContext(episode=episode))
            return await client.generate(request(receiver)), receiver, server

    response, receiver, server = asyncio.run(run())
    assert (response.output_tokens, response.output_logprobs) == (tokens, logprobs)
    assert (receiver.tokens, receiver.logprobs) == (tokens, logprobs)
    assert response.output_versions == [7] * LENGTH
    assert response.stop_reason == "length"
    assert response.attempts == len(server.bodies) <= len(script) - len(server.fates) + 1  # one more per fault


@settings(max_examples=40, deadline=None)
@given(data=st.data(), backend=st.sampled_from(["sglang", "vllm"]), incremental=st.booleans())
def test_tokens_are_the_same_however_the_bytes_are_split(data: st.DataObject, backend: str, incremental: bool) -> None:
    tokens, logprobs = truth()
    server = ScriptedServer(backend)
    server.incremental = incremental
    received, whole = Receiver(), b"".join(server.events(tokens, logprobs, "length"))
    stream = new_stream(dialect_of(backend), received)  # type: ignore[arg-type]
    for part in cuts(whole, data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=9))):
        stream.feed(part)
    assert stream.finish
    assert (received.tokens, received.calls) == (tokens, LENGTH)
    chunk = stream.chunk()
    assert (chunk.tokens, chunk.logprobs, chunk.versions) == (tokens, logprobs, [7] * LENGTH)


def new_stream(dialect: Dialect, receiver: Receiver) -> ReplyReader:
    return ReplyReader(dialect, generation_call(), receiver, version=0, limits=ServerLimits(newest_version=7))


def call_of(recorded: dict[str, Any]) -> GenerationCall:
    """Return the call that a recorded request was; servers gave ids of their own to those without one."""
    body, response = recorded["request"]["body"], recorded["response"]
    lines = [line.partition("data: ")[2] for _, line in response.get("lines", [])]
    first = response.get("body") or orjson.loads(lines[0])
    own = first.get("request_id", first.get("meta_info", {}).get("id", "")).removeprefix("generate-tokens-")
    return generation_call(
        input_ids=body.get("input_ids", body.get("token_ids")),
        rid=body.get("rid", own),
        max_new_tokens=body["sampling_params"].get("max_new_tokens", body["sampling_params"].get("max_tokens")),
        stream="lines" in response,
    )


def feed_recording(dialect: Dialect, name: str) -> tuple[ReplyReader, Receiver]:
    received, recorded = Receiver(), json.loads((FIXTURES / f"{name}.json").read_text())
    stream = ReplyReader(dialect, call_of(recorded), received, version=0, limits=ServerLimits())
    for _, line in recorded["response"]["lines"]:
        stream.feed(line.encode() + b"\n\n")
    return stream, received


@pytest.mark.parametrize(
    ("dialect", "name", "count", "finish"),
    [
        (SGLang(), "wire_sglang/stream_basic", 4, "length"),
        (SGLang(), "wire_sglang/abort_target_stream", 12, "abort"),
        (VLLM(), "wire_vllm/stream_generate", 4, "length"),
    ],
)
def test_streams_of_real_servers_are_understood(dialect: Dialect, name: str, count: int, finish: str) -> None:
    stream, received = feed_recording(dialect, name)
    chunk = stream.chunk()
    assert stream.finish and stream.reports_versions
    assert (len(chunk.tokens), chunk.finish, chunk.versions) == (count, finish, [0] * count)
    assert (received.tokens, received.logprobs, received.calls) == (chunk.tokens, chunk.logprobs, count)


@pytest.mark.parametrize(
    ("dialect", "name", "count"),
    [
        (SGLang(), "wire_sglang/abort_target_generate", 6),
        (SGLang(), "wire_sglang/generate_basic", 6),
        (SGLang(), "wire_sglang/generate_eos", 12),
        (SGLang(), "wire_sglang/generate_stop_string", 6),
        (VLLM(), "wire_vllm/generate_logprobs3", 2),
    ],
)
def test_replies_of_real_servers_name_the_request_and_fit(dialect: Dialect, name: str, count: int) -> None:
    recorded = json.loads((FIXTURES / f"{name}.json").read_text())
    call, text = call_of(recorded), orjson.dumps(recorded["response"]["body"])
    reader = ReplyReader(dialect, call, None, version=0, limits=ServerLimits())
    reader.take(text)
    assert (len(reader.chunk().tokens), reader.chunk().versions) == (count, [0] * count)
    assert len(text) < call.max_reply_bytes / 4
    for wrong, says in (({"rid": "another"}, "the answer to another request"), ({"input_ids": [1]}, "prompt tokens")):
        other = ReplyReader(dialect, replace(call, **wrong), None, version=0, limits=ServerLimits())
        with pytest.raises(BadResponse, match=says):
            other.take(text)


@pytest.mark.parametrize(
    ("dialect", "name"), [(SGLang(), "wire_sglang/stream_error"), (VLLM(), "wire_vllm/stream_error")]
)
def test_an_error_in_a_stream_is_the_servers_refusal(dialect: Dialect, name: str) -> None:
    with pytest.raises(ErrorReply, match="longer than the ") as error:
        feed_recording(dialect, name)
    assert error.value.status == 400


def test_top_logprobs_of_real_servers_are_ids_with_log_probs_best_first() -> None:
    def reply(name: str) -> Any:
        return json.loads((FIXTURES / f"{name}.json").read_text())["response"]["body"]

    recorded = reply("wire_sglang/generate_greedy_top_logprobs_inputlp")
    chunk = SGLang().parse(recorded, top_logprobs=2)
    assert chunk is not None and chunk.top_logprobs[0] == [(7042, -0.2714327871799469), (260, -2.708932876586914)]
    without = SGLang().parse(recorded)
    assert without is not None and without.top_logprobs == []
    chunk = VLLM().parse(reply("wire_vllm/generate_logprobs3"), top_logprobs=3)
    assert chunk is not None and chunk.top_logprobs[0] == [
        (7042, -0.26282957196235657),
        (260, -2.762829542160034),
        (4528, -4.387829780578613),
    ]
    recorded["meta_info"]["output_top_logprobs"] = None
    with pytest.raises(BadResponse, match="3 tokens, 0 lists of top log-probs"):
        SGLang().parse(recorded, top_logprobs=2)


def test_the_first_token_is_passed_on_while_the_answer_is_still_sampled() -> None:
    async def run() -> None:
        server, first = ScriptedServer("sglang"), asyncio.Event()
        server.hold = asyncio.Event()
        async with connected(server) as client:
            answer = asyncio.ensure_future(client.generate(request(lambda *_: first.set())))
            await asyncio.wait_for(first.wait(), 10)
            assert not answer.done()
            await asyncio.sleep(0.05)
            server.hold.set()
            response = await answer
            assert response.output_tokens == truth()[0]
            assert 0 < response.ttft <= response.latency - 0.05

    asyncio.run(run())


def test_each_part_restarts_the_timeout() -> None:
    async def run() -> None:
        due: list[float] = []
        async with connected(ScriptedServer("sglang", sizes=[50])) as client:
            await client.generate(request(lambda *_: due.extend(client.requests._silences._ends.values())))
            assert not client.requests._silences.pending()
        assert len(due) == LENGTH
        assert due == sorted(due) and due[0] < due[-1]

    asyncio.run(run())


@pytest.mark.parametrize("others_are_answered", [False, True])
def test_silence_in_the_middle_is_a_broken_connection(others_are_answered: bool) -> None:
    async def run() -> None:
        server, receiver = ScriptedServer("sglang"), Receiver()
        server.hold = asyncio.Event()  # silent after the first token

        def receive(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            receiver(tokens, logprobs)
            server.hold = None

        async def hear_others(client: EngineClient) -> None:
            while others_are_answered:
                client.pool.servers[0].heard = time.monotonic()
                await asyncio.sleep(0.01)

        async with connected(server, faults={"request_timeout_s": 1.0}) as client:
            others = asyncio.create_task(hear_others(client))
            async with asyncio.timeout(20):
                response = await client.generate(request(receive))
            others.cancel()
        assert (response.output_tokens, response.attempts) == (truth()[0], 2)
        assert receiver.tokens == truth()[0]

    asyncio.run(run())


def test_a_stream_that_breaks_again_and_again_fails_with_the_cause() -> None:
    async def run() -> None:
        receiver = Receiver()
        async with connected(ScriptedServer("sglang", [("reset", 1)] * 9), request_retries=3) as client:
            with pytest.raises(ServerError, match="broke 3 times; the last: .*failed: ClientPayloadError"):
                await client.generate(request(receiver))
        assert receiver.tokens == truth()[0][:3]

    asyncio.run(run())


@pytest.mark.parametrize("error", [ValueError("mine"), ConnectionResetError("my client left"), TimeoutError()])
def test_an_error_of_the_receiver_ends_the_request_at_once(error: Exception) -> None:
    def receive(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        raise error

    async def run() -> None:
        server = ScriptedServer("sglang")
        server.hold = asyncio.Event()
        async with connected(server) as client:
            with pytest.raises(type(error)) as raised:
                await client.generate(request(receive))
            assert raised.value is error
            await asyncio.wait_for(server.closed.wait(), 10)
        assert len(server.bodies) == 1
        assert client.pool.servers[0].failures == 0

    asyncio.run(run())


def test_a_cancelled_stream_closes_its_connection() -> None:
    async def run() -> None:
        server, first = ScriptedServer("sglang"), asyncio.Event()
        server.hold = asyncio.Event()
        async with connected(server) as client:
            answer = asyncio.ensure_future(client.generate(request(lambda *_: first.set())))
            await asyncio.wait_for(first.wait(), 10)
            answer.cancel()
            await asyncio.wait_for(server.closed.wait(), 10)
            with pytest.raises(asyncio.CancelledError):
                await answer

    asyncio.run(run())


def test_an_interrupted_stream_keeps_its_tokens_for_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "INTERRUPT_GRACE_S", 1000.0)

    async def run() -> None:
        server, receiver, first = ScriptedServer("sglang"), Receiver(), asyncio.Event()
        server.hold = asyncio.Event()

        def receive(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            receiver(tokens, logprobs)
            first.set()

        async with connected(server) as client:
            episode = Episode()
            context.enter(EpisodeContext(episode=episode))
            answer = asyncio.ensure_future(client.generate(request(receive)))
            await asyncio.wait_for(first.wait(), 10)
            await client.interrupt([episode])
            assert episode.calls[0].stop_reason == "abort"
            assert episode.calls[0].output_tokens == receiver.tokens == truth()[0][:1]
            answer.cancel()

    asyncio.run(run())


SCHEMA = '{"type": "object"}'


@pytest.mark.parametrize("backend", ["sglang", "vllm", "embedded"])
def test_only_the_embedded_server_is_asked_to_stream_new_tokens_alone(
    backend: Literal["sglang", "vllm", "embedded"],
) -> None:
    for stream in (False, True):
        body = dialect_of(backend).generate_body(generation_call(stream=stream))
        assert body.get("incremental_streaming_output", False) == (stream and backend == "embedded")


@pytest.mark.parametrize("backend", ["sglang", "vllm", "embedded"])
@pytest.mark.parametrize(
    ("error", "status"),
    [({"message": "too long", "code": 400}, 400), ({"message": "too long"}, 500), ("too long", 500)],
)
def test_an_error_in_a_stream_is_the_servers_answer(
    backend: Literal["sglang", "vllm", "embedded"], error: Any, status: int
) -> None:
    with pytest.raises(ErrorReply, match="too long") as raised:
        dialect_of(backend).parse({"error": error})
    assert raised.value.status == status


def test_a_request_gives_up_after_its_tries_and_after_fewer_replies_that_cannot_be() -> None:
    def last_error(max_tries: int, *errors: Exception) -> str | None:
        failures = request_sender.Failures(max_tries)
        for error in errors:
            failures.record(Server("a", 0), error)
        try:
            failures.check()
        except ServerError as raised:
            return str(raised)
        return None

    bad, reset, away = BadResponse("no tokens"), OSError("reset"), ErrorReply(503, "busy")
    assert last_error(2, reset) is None
    assert "in 2 tries; the last: a failed: OSError: reset" in str(last_error(2, reset, reset))
    assert "in 2 tries" in str(last_error(2, ErrorReply(500, "oops"), ErrorReply(408, "late")))
    assert last_error(9, bad, bad) is None
    assert "in 3 tries; the last: a sent no tokens" in str(last_error(9, bad, bad, bad))
    outdated = request_sender.OutdatedReplyError("old")
    silent = request_sender.SilentServerError("silent")
    assert last_error(1, *[away, outdated, silent, ErrorReply(429, "slower")] * 9) is None
    for status, kind in ((400, ConfigError), (413, ConfigError), (422, ConfigError), (501, ServerError)):
        with pytest.raises(kind, match=f"a said HTTP {status}: refused"):
            request_sender.Failures(9).record(Server("a", 0), ErrorReply(status, "refused"))


def test_pauses_grow_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []
    uniform = SimpleNamespace(uniform=lambda low, high: drawn.append((low, high)) or 0.0)
    monkeypatch.setattr(request_sender, "random", uniform)
    for sends in range(1, 10):
        request_sender.pause_s(sends)
    assert drawn == [(0, high) for high in (0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0)]

    async def run() -> None:
        server = ScriptedServer("sglang", [("abort", 0)] * 99)
        async with connected(server, request_retries=8) as client:
            drawn.clear()
            with pytest.raises(ServerError, match="9 times in a row without a token"):
                await client.generate(request())
            assert drawn == [(0, high) for high in (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0)]
            server.fates = [("abort", 0), ("abort", 0), ("abort", 1), ("abort", 0)]
            drawn.clear()
            assert (await client.generate(request())).output_tokens == truth()[0]
            assert drawn == [(0, 0.02), (0, 0.04), (0, 0.02)]
            server.fates = [("reset", 1)] * 99
            drawn.clear()
            with pytest.raises(ServerError, match="broke 8 times"):
                await client.generate(request(Receiver()))
            assert drawn == [(0, high) for high in (0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0)]

    asyncio.run(run())


@pytest.mark.parametrize("min_new_tokens", [2, 8])
def test_what_is_left_of_an_aborted_answer_is_asked_for(min_new_tokens: int) -> None:
    async def run() -> None:
        server, loads = ScriptedServer("sglang", [("abort", 3)]), []
        async with connected(server) as client:
            (target,) = client.pool.servers
            asked = request(lambda *_: loads.append(target.load), min_new_tokens=min_new_tokens)
            response = await client.generate(asked)
            assert response.output_tokens == truth()[0]
            assert set(loads) == {len(PROMPT) + LENGTH} and target.load == 0
            sampling = [body["sampling_params"] for body in server.bodies]
            assert [one["max_new_tokens"] for one in sampling] == [LENGTH, LENGTH - 3]
            assert [one.get("min_new_tokens") for one in sampling] == [
                min_new_tokens,
                5 if min_new_tokens == 8 else None,
            ]
            assert 0 < response.ttft <= response.latency < 60
            assert client.pool.metrics()["0/latency_p95_s"] < 60
            assert not client._calls
            for fields in ({}, {"regex": "a+"}):  # aborted after the last token
                server.fates = [("abort", LENGTH)]
                response = await client.generate(request(**fields))
                assert (response.stop_reason, response.attempts) == ("length", 1)
                assert 0 < response.ttft <= response.latency

    asyncio.run(run())


@pytest.mark.parametrize("with_top", [False, True])
def test_a_recorded_answer_is_reused_if_it_has_all_that_is_asked_for(with_top: bool) -> None:
    async def run() -> None:
        server, episode = ScriptedServer("sglang"), Episode()
        tokens, logprobs = truth()
        top = [[(token, logprob)] for token, logprob in zip(tokens, logprobs, strict=True)] if with_top else []
        recorded = {"output_tokens": tokens, "output_logprobs": logprobs, "output_versions": [7] * LENGTH}
        for prompt in ([*PROMPT, 1], [2, 1, 4], PROMPT):
            answer = ModelResponse(input_tokens=prompt, output_top_logprobs=top, stop_reason="stop", **recorded)
            episode.record(answer)
        async with connected(server) as client:
            context.enter(EpisodeContext(episode=episode))
            client.requests.version = 8
            if with_top:
                receiver = Receiver()
                response = await client.generate(request(receiver, top_logprobs=1))
                assert response.output_top_logprobs == top
                assert (receiver.tokens, receiver.logprobs) == (tokens, logprobs)
            else:
                with pytest.raises(ServerError, match="lists of top log-probs"):
                    await client.generate(request(top_logprobs=1))
                episode.record(ModelResponse(input_tokens=PROMPT, stop_reason="stop", **recorded))
                response = await client.generate(request())
            assert (response.output_tokens, response.output_versions) == (tokens, [7] * LENGTH)
            assert (response.attempts, response.server, response.stop_reason) == (0, "", "stop")
            assert episode.oldest_version == 8
            client.requests.version = 9
            answer = await client.generate(ModelRequest(input_ids=[9], gconfig=request().gconfig))
            assert (answer.attempts, answer.server) == (1, client.pool.servers[0].url)
            assert episode.oldest_version == 8 and episode.server is client.pool.servers[0]
            assert sum(map(len, episode.recorded.values())) == 2
            again = await client.generate(ModelRequest(input_ids=[2, 1, 4]))
            assert (again.attempts, again.server) == (0, "")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("adapter", "serves", "answers", "trusted"),
    [
        (None, "m", "m", True),
        (None, "m", None, True),
        (None, None, "other", True),
        (None, "m", "other", False),
        ("a", "m", "a", True),
        ("a", "m", "m", False),
    ],
)
def test_an_answer_of_another_model_has_its_server_compared_before_its_next(
    adapter: str | None, serves: str | None, answers: str | None, trusted: bool
) -> None:
    class Named(ScriptedServer):
        def vllm(self, *args: Any) -> dict[str, Any]:
            return super().vllm(*args) | {"model": answers if len(self.bodies) == 1 else serves}

    async def run() -> None:
        server = Named("vllm")
        async with connected(server) as client:
            (address,) = client.pool.servers
            address.adapter, address.info = adapter, replace(address.info, name=serves)
            asked: list[Server] = []
            info = client.requests.info

            async def counted(one: Server) -> ServerInfo:
                asked.append(one)
                one.adapter = None
                return replace(await info(one), name=serves)

            client.requests.info = counted  # type: ignore[method-assign]
            response = await client.generate(request(max_new_tokens=1))
            assert (response.attempts, address.bad_replies, len(asked)) == ((1, 0, 0) if trusted else (2, 1, 1))
            said = f"sent an answer of '{answers}', but it served '{adapter or serves}'"
            assert trusted or address.last_failure == said

    asyncio.run(run())


def test_an_answer_keeps_all_of_its_parts() -> None:
    call = Answer(request(), None, must_stay=False)
    parts = range(3)
    for part in parts:
        call.extend(Chunk([part], [-0.5 * part], [part], "abort", top_logprobs=[[(part, -0.5)]]))
    response = call.finish(PROMPT, "stop")
    assert response.output_tokens == response.output_versions == list(parts)
    assert response.output_logprobs == [-0.5 * part for part in parts]
    assert response.output_top_logprobs == [[(part, -0.5)] for part in parts]


def client_alone(**more: Any) -> EngineClient:
    return EngineClient(InferenceEngineConfig(backend="sglang", addresses=["a:1"]), **more)


@pytest.mark.parametrize("told", [False, True])
def test_the_end_of_patience_fails_all_that_wait(told: bool) -> None:
    async def run() -> None:
        said: list[ServerError] = []
        client = client_alone(on_outage=said.append) if told else client_alone()
        left, *waiting = [asyncio.create_task(client.gate.until_usable()) for _ in range(3)]
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        error = ServerError("all are away")
        client.gate.give_up(error)
        for task in waiting:
            with pytest.raises(ServerError, match="all are away"):
                await task
        assert said == [error] * told and not client.gate._waiting

    asyncio.run(run())


def test_as_many_requests_are_woken_as_the_server_has_places() -> None:
    async def run() -> None:
        client = client_alone()
        (server,) = client.pool.servers
        gone, *waiting = [asyncio.create_task(client.gate.until_usable()) for _ in range(6)]
        await asyncio.sleep(0)
        gone.cancel()  # wakes nobody
        for limit, woken in ((1, 0), (3, 2), (4, 5)):
            server.capacity, server.outstanding = limit, 1
            client.gate.wake_for(server)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert sum(task.done() for task in waiting) == woken
        assert gone.cancelled()

    asyncio.run(run())


def test_requests_are_held_until_all_holders_release_and_nobody_waits_for_a_server_meanwhile() -> None:
    client = client_alone()
    assert (client.requests.version, client.counts()["retried_requests"], client.gate.is_waiting) == (0, 0, False)
    client.gate.running += 1
    assert client.gate.is_waiting and not client.gate.holders
    client.gate.hold("trainer")
    for _ in range(2):  # each server that an update pauses
        client.gate.hold("update")
    client.gate.release("update")
    assert client.gate.holders == {"trainer"} and not client.gate.is_waiting
    client.gate.release("trainer")
    assert not client.gate.holders and client.gate.is_waiting
    server = client.pool.servers[0]
    assert not client.gate.must_stay(server)
    client.pool.start(server, 1, 0.0, stays=True)
    assert client.gate.must_stay(server)


def test_no_request_is_sent_in_a_hold() -> None:
    async def run() -> None:
        client = client_alone()
        client.gate.hold("trainer")
        call = asyncio.create_task(client.generate(request()))
        for _ in range(20):
            await asyncio.sleep(0)
        assert client.pool.servers[0].outstanding == 0 and not call.done()
        call.cancel()

    asyncio.run(run())


def test_a_router_looks_at_once_at_a_server_that_is_back() -> None:
    client = EngineClient(InferenceEngineConfig(backend="sglang", addresses=["a:1"], router="r:1"))
    assert not client.gate.servers_changed.is_set()
    client.gate.server_changed(client.pool.servers[0])
    assert client.gate.servers_changed.is_set()


def test_a_request_avoids_each_server_that_failed_it() -> None:
    servers, failures = [Server("a", 0), Server("b", 1)], request_sender.Failures(9)
    for server in (servers[0], servers[1], servers[0]):
        failures.record(server, OSError("reset"))
    assert failures.servers == servers and failures.last == "a failed: OSError: reset"


def test_a_request_that_is_woken_and_cancelled_at_once_wakes_the_next_one() -> None:
    async def run() -> None:
        async with connected(ScriptedServer("sglang", [])) as client:
            first, second = (asyncio.create_task(client.gate.until_usable()) for _ in range(2))
            await asyncio.sleep(0)
            client.gate.wake_one()
            first.cancel()
            await asyncio.wait_for(second, 10)
            assert first.cancelled()

    asyncio.run(run())


def test_unset_parameters_are_not_sent_and_set_ones_have_the_servers_names() -> None:
    def sampling(dialect: Dialect, **fields: Any) -> dict[str, Any]:
        body = dialect.generate_body(generation_call(GenerationHyperparameters(**fields)))
        parameters: dict[str, Any] = body["sampling_params"]
        return parameters

    plain = {"max_new_tokens", "temperature", "skip_special_tokens"}
    assert set(sampling(SGLang())) == plain
    shaped = {"min_p": 0.1, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {5: -1.0}}
    ours = sampling(SGLang(), **shaped, extra={"custom": 1})
    assert {name: ours[name] for name in set(ours) - plain} == shaped | {
        "logit_bias": {"5": -1.0},
        "custom": 1,
    }
    theirs, default = sampling(VLLM(), **shaped), sampling(VLLM())
    assert {name: theirs[name] for name in set(theirs) - set(default)} == shaped | {"logit_bias": {"5": -1.0}}
    assert "min_p" not in sampling(SGLang(), min_p=0.1, greedy=True)
    for name, key in (("json_schema", "json"), ("regex", "regex"), ("ebnf", "grammar")):
        assert sampling(SGLang(), **{name: SCHEMA})[name] == SCHEMA
        assert sampling(VLLM(), **{name: SCHEMA})["structured_outputs"] == {key: SCHEMA}
    for dialect, clash in ((SGLang(), {"temperature": 1}), (VLLM(), {"logprobs": 1}), (VLLM(), {"n": 2})):
        with pytest.raises(ConfigError, match=f"gconfig.extra sets '{next(iter(clash))}'"):
            sampling(dialect, extra=clash)


def test_a_constrained_answer_that_a_server_cannot_continue_starts_again() -> None:
    """After an abort the server would begin a new JSON document behind the tokens of the first."""

    async def run() -> None:
        server = ScriptedServer("sglang", [("abort", 3)])
        async with connected(server) as client:
            response = await client.generate(request(json_schema=SCHEMA))
            assert response.output_tokens == truth()[0]
            assert [body["input_ids"] for body in server.bodies] == [PROMPT, PROMPT]
            server.fates = [("abort", 3)]
            with pytest.raises(ServerError, match="which it cannot continue. Send it without on_tokens"):
                await client.generate(request(Receiver(), json_schema=SCHEMA))
            server.fates = [("abort", 3)] * 99
            with pytest.raises(ServerError, match="9 times in a row without a token"):
                await client.generate(request(regex="a+"))
        embedded = ScriptedServer("embedded", [("abort", 3)])
        async with connected(embedded) as client:
            assert (await client.generate(request(json_schema=SCHEMA))).output_tokens == truth()[0]
            assert [body.get("num_continued") for body in embedded.bodies] == [None, 3]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("backend", "constrained", "pause"),
    [
        ("sglang", True, ("/pause_generation", {"mode": "retract"})),
        ("sglang", False, ("/pause_generation", {"mode": "abort"})),
        ("embedded", True, ("/pause_generation", {"mode": "abort"})),
        ("vllm", True, ("/pause?mode=keep", {})),
        ("vllm", False, ("/pause?mode=abort", {})),
    ],
)
def test_a_constrained_answer_stays_on_the_server_during_a_weight_update(
    backend: str, constrained: bool, pause: tuple[str, Any]
) -> None:
    async def run() -> None:
        server, first = ScriptedServer(backend), asyncio.Event()
        server.hold = asyncio.Event()
        async with connected(server) as client:
            fields = {"ebnf": 'root ::= "a"'} if constrained else {}
            answer = asyncio.ensure_future(client.generate(request(lambda *_: first.set(), **fields)))
            await asyncio.wait_for(first.wait(), 10)
            await client.update_weights(WeightFolder("ckpt", 8))
            assert server.control[1] == pause  # after the resume at the start
            server.hold.set()
            assert (await answer).output_tokens == truth()[0]

    asyncio.run(run())


def test_an_engine_passes_on_tokens_of_all_its_servers(
    start_stub: Callable[..., StubThread], start_engine: Callable[..., RemoteInfEngine]
) -> None:
    """Over a weight update that aborts the answer, too."""
    stub = start_stub(answer_len=6)
    stub.call(lambda: setattr(stub.server, "hold", asyncio.Event()))
    engine, receiver = start_engine(stub, max_head_offpolicyness=2), Receiver()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: asyncio.run(engine.agenerate(request(receiver, max_new_tokens=6))))
        stub.until_held(1)
        engine.update_weights_from_disk("ckpt", 5)
        stub.call(lambda: stub.server.hold.set())  # type: ignore[union-attr]
        response = running.result(10)
    before = answer_tokens(PROMPT, 0, 3)
    assert response.output_tokens == [*before, *answer_tokens([*PROMPT, *before], 5, 3)]
    assert (receiver.tokens, receiver.logprobs) == (response.output_tokens, response.output_logprobs)
    assert response.output_versions == [0] * 3 + [5] * 3


def test_a_request_that_does_not_stream_asks_for_the_whole_answer() -> None:
    async def run() -> None:
        server = ScriptedServer("embedded")
        async with connected(server) as client:
            assert (await client.generate(request())).output_tokens == truth()[0]
            with pytest.raises(ConfigError, match="top_logprobs is -1"):
                await client.generate(request(top_logprobs=-1))
        assert set(server.bodies[0]) == {"rid", "input_ids", "sampling_params", "return_logprob", "stream"}
        assert server.bodies[0]["stream"] is False

    asyncio.run(run())
