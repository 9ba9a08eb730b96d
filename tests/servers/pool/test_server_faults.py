"""Faults of real HTTP servers: each costs little, is logged once, and none hangs a run or ends it needlessly."""

from __future__ import annotations
import asyncio
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
import pytest
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig, ModelRequest, ModelResponse
from areal_lite.errors import ConfigError, ServerError, StarvationError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.client import server_requests
from areal_lite.servers.client.engine_client import EngineClient
from areal_lite.servers.pool import reconciler, request_gate
from areal_lite.servers.pool.server_pool import MAX_REST_S, Server, ServerPool
from tests.rollout.scripted import OneTurn, until
from tests.stub_server import LIES, StubThread, answer_tokens

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


def generate(engine: RemoteInfEngine, **sampling: Any) -> ModelResponse:
    request = ModelRequest(input_ids=[1, 2, 3], gconfig=GenerationHyperparameters(**sampling))
    return asyncio.run(engine.agenerate(request))


def accepted(engine: RemoteInfEngine, episodes: int) -> int:
    return sum(group.status == "accepted" for group in engine.rollout_batch([{}] * episodes, OneTurn))


def servers(engine: RemoteInfEngine) -> list[Server]:
    return engine._client.pool.servers


def lines(caplog: pytest.LogCaptureFixture, stub: StubThread) -> list[str]:
    """Return what was said about a server, without its reasons."""
    mark = f"server http://{stub.address} is "
    return [m.removeprefix(mark).split(":")[0] for m in caplog.messages if m.startswith(mark)]


# -- failures in a row ---------------------------------------------------------------------------


def test_a_server_may_fail_any_number_of_times_in_a_row() -> None:
    pool = ServerPool(["a:1", "b:2"])
    failing = pool.servers[0]
    for _ in range(3000):
        pool.failed(failing, "refused")
        pool.set_state(failing, "trial")
    assert failing.rest_s <= MAX_REST_S
    assert failing.state == "trial"
    pool.failed(failing, "refused")
    assert all(pool.pick() is pool.servers[1] for _ in range(5))


def test_a_few_quick_errors_among_many_running_requests_do_not_rest_a_server() -> None:
    pool = ServerPool(["a:1"])
    server = pool.servers[0]
    for _ in range(96):
        pool.start(server, 10, 0.0)
    failed = 0
    while server.usable:
        pool.end(server, 10)
        pool.failed(server, "reset")
        failed += 1
    assert failed == 10  # one for eight of the 86 that still run


def test_nothing_runs_after_a_client_was_closed_while_it_repaired_a_server(start_stub: StartStub) -> None:
    stub = start_stub()
    client = EngineClient(InferenceEngineConfig(backend="sglang", addresses=[stub.address]))

    async def use() -> None:
        await client.open()
        stub.server.dead = True
        client._reconciler.failed(client.pool.servers[0], "gone", at_once=True)
        await asyncio.sleep(0)
        await client.close()
        for _ in range(20):
            assert asyncio.all_tasks() == {asyncio.current_task()}
            await asyncio.sleep(0)

    asyncio.run(use())


# -- replies that cannot be trusted --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "says"),
    [("empty", "sent no tokens"), ("long", "sent 9 tokens for a request of at most 8"), ("newer", "of version 99")],
)
def test_a_reply_that_cannot_be_is_refused_and_counted(
    start_stub: StartStub, start_engine: StartEngine, fault: str, says: str
) -> None:
    stub = start_stub(fault=lambda n: fault if n == 0 else None)
    engine = start_engine(stub)
    engine.update_weights_from_disk("ckpt", 1)
    response = generate(engine, max_new_tokens=8)
    assert (response.output_len, response.attempts) == (8, 2)
    assert engine.server_metrics()["0/bad_replies"] == 1
    assert says in servers(engine)[0].last_failure


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_what_is_not_true_is_asked_again_on_another_server(
    start_stub: StartStub, start_engine: StartEngine, lie: str, updated: bool, stream: bool
) -> None:
    lying, sound = start_stub(fault=lambda n: lie), start_stub()
    engine = start_engine(lying, sound)
    if updated:
        engine.update_weights_from_disk("ckpt", 4)
    first = servers(engine)[0]
    engine._client.pool.servers[1].load += 10**6  # so that the other one is asked first
    request = ModelRequest(
        input_ids=[1, 2, 3],
        gconfig=GenerationHyperparameters(max_new_tokens=8),
        on_tokens=(lambda *_: None) if stream else None,
    )
    answer = asyncio.run(engine.agenerate(request))
    version = 4 if updated else 0
    kept, bad = (7, 2) if stream and lie in LATE_LIES else (0, 1)  # the rest is asked where the beginning is cached
    assert answer.output_tokens[: kept or 8] == answer_tokens([1, 2, 3], version, kept or 8)
    assert (answer.output_versions, answer.attempts, answer.server) == ([version] * 8, bad + 1, servers(engine)[1].url)
    assert (first.bad_replies, lying.server.seen["generate"], sound.server.seen["generate"]) == (bad, bad, 1)


LATE_LIES = {"first newer", "negative version", "fraction", "30 digits"}
"""A stream of SGLang tells these in its last event, so the seven tokens before it are kept."""


def test_a_reply_without_an_end_is_read_no_further_than_its_tokens_can_take(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    flooding, sound = start_stub(fault=lambda n: "flood"), start_stub()
    engine = start_engine(flooding, sound)
    servers(engine)[1].load += 10**6
    answer = generate(engine, max_new_tokens=8)
    assert (answer.attempts, answer.server) == (2, servers(engine)[1].url)
    assert "a reply of more than 73728 bytes" in servers(engine)[0].last_failure
    assert 0 < flooding.server.seen["bytes"] < 2**25


def test_a_reply_that_has_begun_must_end_in_time_also_while_its_server_answers_others(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    dripping, sound = start_stub(fault=lambda n: "trickle"), start_stub()
    engine = start_engine(dripping, sound, faults={"request_timeout_s": 1.0})
    servers(engine)[1].load += 10**6
    servers(engine)[0].heard = time.monotonic() + 1000
    began = time.monotonic()
    answer = generate(engine, max_new_tokens=8000)
    assert (answer.attempts, answer.server) == (2, servers(engine)[1].url)
    assert 1.0 <= time.monotonic() - began < 10
    assert "no answer in 1 s" in servers(engine)[0].last_failure


def test_a_resumed_answer_longer_than_its_rest_is_refused(start_stub: StartStub, start_engine: StartEngine) -> None:
    faults = {0: "cut", 1: "long"}
    engine = start_engine(start_stub(fault=faults.get))
    response = generate(engine, max_new_tokens=8)
    assert (response.output_len, response.stop_reason) == (8, "stop")
    assert "sent 5 tokens for a request of at most 4" in servers(engine)[0].last_failure


def test_versions_of_an_earlier_run_are_no_fault_before_the_first_update(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    stub.server.version = "7"
    engine = start_engine(stub)
    assert generate(engine).output_versions[0] == 7
    stub.server.version = "8"  # which it did not report when it was asked
    with pytest.raises(ServerError, match="tokens of version 8, but the newest is 7"):
        generate(engine)
    until(lambda: servers(engine)[0].usable)
    engine.update_weights_from_disk("ckpt", 1)
    stub.server.version = "7"  # only what this run published counts from here on, and the server gets that again
    assert set(generate(engine).output_versions) == {1}
    assert "sent tokens of version 7, but the newest is 1" in servers(engine)[0].last_failure


@pytest.mark.parametrize("first", ["default", "0"])
def test_a_server_that_never_had_an_update_may_name_no_version(
    start_stub: StartStub, start_engine: StartEngine, first: str
) -> None:
    stub = start_stub()
    stub.server.version = first
    engine = start_engine(stub)
    assert set(generate(engine).output_versions) == {0}
    stub.server.version = "1"
    with pytest.raises(ServerError, match="tokens of version 1, but the newest is 0"):
        generate(engine)


def test_weights_that_were_swapped_at_the_same_address_are_seen_in_the_next_reply(
    start_stub: StartStub, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    stub = start_stub(fault=lambda n: "older" if n == 1 else None)
    engine = start_engine(stub)
    engine.update_weights_from_disk("ckpt", 4)
    assert generate(engine).attempts == 1
    assert set(generate(engine).output_versions) == {4}  # the second is refused for its first token
    stub.server.version = "default"
    assert set(generate(engine).output_versions) == {4}
    assert stub.server.seen["update"] == 3
    assert sum("it acknowledged version 4 and sent tokens of version 0" in line for line in caplog.messages) == 2


# -- servers that are not what they should be ------------------------------------------------------


@pytest.mark.parametrize("status", ["401", "403", "404", "405"])
def test_a_fast_server_without_the_route_does_not_drain_the_pool(
    start_stub: StartStub, start_engine: StartEngine, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, *sound = start_stub(fault=lambda n: status), start_stub(delay_s=0.01), start_stub(delay_s=0.01)
    assert accepted(start_engine(wrong, *sound, max_concurrent_rollouts=50), 300) == 300
    assert wrong.server.seen["generate"] < 100
    assert lines(caplog, wrong) == ["down"]


@pytest.mark.parametrize("status", ["400", "413", "422"])
def test_a_refused_request_is_no_fault_of_the_server(
    start_stub: StartStub, start_engine: StartEngine, status: str
) -> None:
    stub = start_stub(fault=lambda n: status if n < 9 else None)
    engine = start_engine(stub)
    for _ in range(9):
        with pytest.raises(ConfigError, match=f"scheduled {status}"):
            generate(engine)
    assert servers(engine)[0].state == "up"
    assert generate(engine).attempts == 1


def test_a_server_that_knows_no_route_fails_the_start(start_stub: StartStub, start_engine: StartEngine) -> None:
    wrong = start_stub()
    wrong.server.dead = True
    with pytest.raises(ConfigError, match=rf"{wrong.address} said HTTP 404 to /server_info.*rollout.addresses"):
        start_engine(start_stub(), wrong)


def model(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"vocab_size": 99}, "vocab_size 99 instead of 64"),
        ({"context_length": 8192}, "a context of 8192 tokens instead of 4096"),
        ({"model_path": "OTHER"}, "hidden_size 16 instead of 8"),
    ],
)
def test_a_server_of_another_model_fails_the_start(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path, told: dict[str, Any], says: str
) -> None:
    ours = model(tmp_path / "ours", vocab_size=64, hidden_size=8, max_position_embeddings=4096)
    other = model(tmp_path / "other", vocab_size=64, hidden_size=16)
    stub = start_stub()
    stub.server.told |= {key: other if value == "OTHER" else value for key, value in told.items()}
    with pytest.raises(ConfigError, match=f"the run trains {ours}: .*{says}"):
        start_engine(stub, model_path=ours)
    stub.server.told = {"context_length": 2048, "vocab_size": 64, "model_path": "/weights/v00000007"}
    start_engine(stub, model_path=ours)


def test_a_server_that_does_not_answer_at_the_start_is_left_out_and_joins_later(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(reconciler, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(server_requests, "CONTROL_TIMEOUT_S", 1.0)
    sound, hung = start_stub(), start_stub()
    hung.server.hangs = {"/server_info"}
    began = time.monotonic()
    engine = start_engine(sound, hung)
    assert time.monotonic() - began < 10
    assert accepted(engine, 20) == 20
    assert hung.server.seen["generate"] == 0
    hung.server.hangs = set()
    until(lambda: accepted(engine, 4) and servers(engine)[1].state == "up")


# -- outages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("fault", ["503", "502"])
def test_an_outage_shorter_than_the_patience_costs_no_episode(
    start_stub: StartStub, start_engine: StartEngine, count: int, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    out = [True]
    stubs = [start_stub(fault=lambda n: fault if out[0] else None) for _ in range(count)]
    engine = start_engine(*stubs, request_retries=1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(accepted, engine, 200)
        until(lambda: all(stub.server.paths["/health"] + stub.server.seen["info"] > 6 for stub in stubs))
        out[0] = False
        assert running.result(30) == 200
    until(lambda: accepted(engine, 6) and all(server.state == "up" for server in servers(engine)))
    assert all(lines(caplog, stub) == ["down", "back"] for stub in stubs)
    assert engine.failures.metrics()["failed_episodes"] == 0


def test_patience_ends_the_run_with_the_cause_and_says_so_before(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(request_gate, "OUTAGE_LINE_S", 0.1)
    engine = start_engine(start_stub(fault=lambda n: "503"), faults={"outage_patience_s": 0.5}, consumer_batch_size=4)
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"no inference server was healthy for 0.5 s: .*HTTP 503"):
        engine.prepare_batch([{}] * 4, OneTurn)
    assert 0.5 < time.monotonic() - began < 5
    with pytest.raises(ServerError, match=r"no inference server was healthy"):
        engine.rollout_batch([{}] * 4, OneTurn)
    assert 1 <= sum("the run ends after" in message for message in caplog.messages) < 20


def test_a_wait_is_no_try_and_lasts_as_long_as_the_server_says(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub(fault=lambda n: "429" if n == 0 else None)
    stub.server.retry_after = "1"
    engine = start_engine(stub, request_retries=1)
    began = time.monotonic()
    assert generate(engine).attempts == 2
    assert time.monotonic() - began >= 1.0
    assert servers(engine)[0].state == "up"


def test_a_server_that_says_429_gets_fewer_requests_at_once_and_slowly_more() -> None:
    pool = ServerPool(["a:1", "b:2"])
    server = pool.servers[0]
    for _ in range(64):
        pool.start(server, 10, 1.0)
    for _ in range(20):  # all were sent before the limit fell
        pool.throttled(server, "429", sent=1.0, now=2.0)
    assert server.limit == 32
    pool.throttled(server, "429", sent=3.0, now=3.0)
    assert server.limit == 16
    for _ in range(64):
        pool.end(server, 10)
    for _ in range(50):
        pool.succeeded(server, 8, 0.1, 4.0)
    assert math.isclose(server.limit, 17)
    for _ in range(17):
        assert server.usable
        pool.start(server, 10, 5.0)
    assert not server.usable
    assert pool.pick(preferred=server) is pool.servers[1]
    pool.end(server, 10)
    assert pool.pick(preferred=server) is server


@pytest.mark.parametrize("said", ["429", "queue full"])
def test_more_requests_than_the_limit_wait_and_are_all_answered(
    start_stub: StartStub, start_engine: StartEngine, said: str
) -> None:
    stub = start_stub(fault=lambda n: said if n < 40 else None, delay_s=0.001)
    engine = start_engine(stub, request_retries=1)
    assert accepted(engine, 120) == 120
    assert servers(engine)[0].limit < 120


def test_all_that_wait_are_sent_at_once_when_a_server_is_back(start_stub: StartStub, start_engine: StartEngine) -> None:
    out = [True]
    stub = start_stub(fault=lambda n: "503" if out[0] else None, delay_s=0.3)
    engine = start_engine(stub)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(accepted, engine, 60)
        until(lambda: len(engine._client.gate._waiting) > 57)
        out[0] = False
        began = time.monotonic()
        assert running.result(30) == 60
    assert time.monotonic() - began < 10  # one by one they would take 18 s


def test_a_refusal_in_the_middle_of_a_stream_ends_the_request(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(fault=lambda n: "422"))
    with pytest.raises(ConfigError, match="scheduled 422"):
        asyncio.run(engine.agenerate(ModelRequest(input_ids=[1], on_tokens=lambda *_: None)))


# -- silence ---------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "SILENCE_S", 0.2)
    monkeypatch.setattr(reconciler, "IDLE_WATCH_S", 0.05)
    monkeypatch.setattr(server_requests, "CONTROL_TIMEOUT_S", 0.5)


@pytest.mark.usefixtures("quick")
def test_a_hung_server_loses_its_requests_to_the_others(
    start_stub: StartStub, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    sound, hung = start_stub(), start_stub()
    engine = start_engine(sound, hung, request_retries=1)
    hung.server.hangs = {"/generate", "/health", "/server_info", "/continue_generation"}
    began = time.monotonic()
    assert accepted(engine, 40) == 40
    assert time.monotonic() - began < 15
    assert lines(caplog, hung) == ["down"]
    assert "no answer to its health probes" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_server_that_hangs_when_an_update_comes_loses_its_requests_too(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconciler, "IDLE_WATCH_S", 1000.0)  # the update finds it first
    sound, hung = start_stub(), start_stub()
    engine = start_engine(sound, hung, request_retries=1)
    hung.server.hangs = {"/generate", "/health", "/server_info", "/continue_generation", "/pause_generation"}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(accepted, engine, 40)
        until(lambda: hung.server.paths["/generate"])
        engine.update_weights_from_disk("ckpt", 1)
        assert running.result(30) == 40
    assert lines(caplog, hung) == ["behind", "down"]


@pytest.mark.usefixtures("quick")
def test_a_slow_server_that_is_healthy_keeps_its_requests(
    start_stub: StartStub, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    stub = start_stub(delay_s=0.7)
    assert generate(start_engine(stub)).attempts == 1
    assert lines(caplog, stub) == ["slow", "back"]


def test_a_long_answer_may_take_its_time_while_the_server_answers_others(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    stub.server.holds = lambda ids: ids == [9]
    stub.call(lambda: setattr(stub.server, "hold", asyncio.Event()))
    engine = start_engine(stub, faults={"request_timeout_s": 1.5})
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(asyncio.run, engine.agenerate(ModelRequest(input_ids=[9])))
        stub.until_held(1)
        ends = time.monotonic() + 2.5
        while time.monotonic() < ends:
            generate(engine)
        stub.call(lambda: stub.server.hold.set())  # type: ignore[union-attr]
        assert long.result(10).attempts == 1


# -- weights that are not what they should be ------------------------------------------------------


def test_a_server_that_keeps_old_weights_gets_the_newest_again_while_others_serve(
    start_stub: StartStub, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    sound, liar = start_stub(), start_stub()
    liar.server.stays_old = True
    engine = start_engine(sound, liar)
    engine.update_weights_from_disk("ckpt", 1)
    for _ in range(20):
        groups = engine.rollout_batch([{}] * 4, OneTurn)
        assert {g.head_version for g in groups} == {1}
    assert liar.server.seen["update"] > 1
    liar.server.stays_old = False
    until(lambda: accepted(engine, 4) and liar.server.version == "1" and servers(engine)[1].state == "up")
    assert "it acknowledged version 1 and sent tokens of version 0" in caplog.text


def test_a_server_that_restarts_with_old_weights_gets_the_newest(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    engine = start_engine(stub)
    engine.update_weights_from_disk("ckpt", 1)
    stub.server.version = "default"
    assert set(generate(engine).output_versions) == {1}
    assert stub.server.seen["update"] == 2


def test_a_server_that_moved_gets_the_newest_weights_before_requests(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    former, new = start_stub(), start_stub()
    engine = start_engine(former)
    engine.update_weights_from_disk("ckpt", 1)
    engine.move_server("http://127.0.0.1:1", f"http://{new.address}")  # of no server
    engine.move_server(f"http://{former.address}", f"http://{new.address}")
    until(lambda: servers(engine)[0].url == f"http://{new.address}")
    assert set(generate(engine).output_versions) == {1}
    assert (new.server.seen["update"], new.server.seen["generate"]) == (1, 1)
    assert former.server.seen["generate"] == 0


@pytest.mark.parametrize(("version", "updates"), [("1", 1), ("default", 2)])
def test_a_server_that_was_down_gets_the_newest_weights_only_if_it_has_others(
    start_stub: StartStub, start_engine: StartEngine, version: str, updates: int
) -> None:
    out = [False]
    stub = start_stub(fault=lambda n: "503" if out[0] else None)
    engine = start_engine(stub)
    engine.update_weights_from_disk("ckpt", 1)
    out[0] = True
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine)
        until(lambda: servers(engine)[0].state == "down")
        stub.server.version = version
        out[0] = False
        assert set(running.result(30).output_versions) == {1}
    assert stub.server.seen["update"] == updates


def test_old_weights_for_ever_end_the_run_instead_of_a_silent_loop(
    start_stub: StartStub, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    stub = start_stub()
    stub.server.stays_old = True
    engine = start_engine(stub, faults={"outage_patience_s": 0.5})
    engine.update_weights_from_disk("ckpt", 1)
    with pytest.raises(ServerError, match="no inference server was healthy"):
        engine.prepare_batch([{}] * 2, OneTurn)
    assert lines(caplog, stub) == ["behind", "down"]


@pytest.mark.parametrize("batch", [1, 4])
def test_groups_that_are_always_stale_end_in_starvation(
    start_stub: StartStub, start_engine: StartEngine, batch: int
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=batch, faults={"max_empty_batches": 3})
    engine.set_version(5)
    with pytest.raises(StarvationError, match="stale"):
        engine.prepare_batch([{}] * 8, OneTurn)


# -- pauses and updates ----------------------------------------------------------------------------


def test_a_server_that_a_killed_run_left_paused_is_resumed_at_the_start(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    stub.call(stub.server._resumed.clear)
    assert generate(start_engine(stub)).attempts == 1


@pytest.mark.usefixtures("quick")
def test_a_server_that_is_paused_during_the_run_is_resumed(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub()
    engine = start_engine(stub)
    stub.call(stub.server._resumed.clear)
    assert generate(engine).attempts == 1


def test_an_update_does_not_wait_for_a_server_that_hangs(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "STRAGGLER_S", 0.1)
    sound, hung = start_stub(), start_stub()
    hung.server.hangs = {"/update_weights_from_disk"}
    engine = start_engine(sound, hung)
    began = time.monotonic()
    engine.update_weights_from_disk("ckpt", 1)
    assert time.monotonic() - began < 5
    assert engine.get_version() == 1
    assert accepted(engine, 10) == 10
    assert hung.server.seen["generate"] == 0


def test_an_update_that_fails_after_others_had_it_is_no_stray_exception(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch,
    stray_exceptions: Callable[[], list[str]],
) -> None:  # fmt: skip
    monkeypatch.setattr(reconciler, "STRAGGLER_S", 0.1)
    sound, hung = start_stub(), start_stub()
    hung.server.hangs = {"/update_weights_from_disk"}
    start_engine(sound, hung, faults={"request_timeout_s": 0.3}).update_weights_from_disk("ckpt", 1)
    until(lambda: hung.server.paths["/update_weights_from_disk"] > 1)  # the first has timed out
    assert stray_exceptions() == []


def test_an_update_waits_out_an_outage(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub()
    engine = start_engine(stub)
    stub.server.refuses = {"/update_weights_from_disk", "/pause_generation"}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.update_weights_from_disk, "ckpt", 1)
        until(lambda: stub.server.paths["/pause_generation"] > 3)
        stub.server.refuses = set()
        running.result(10)
    assert (engine.get_version(), stub.server.version) == (1, "1")


def test_a_hung_update_can_be_interrupted_and_the_engine_ends_at_once(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    stub.server.hangs = {"/update_weights_from_disk", "/continue_generation"}
    began = time.monotonic()

    async def interrupted(engine: RemoteInfEngine) -> None:
        update = asyncio.create_task(engine.aupdate_weights_from_disk("ckpt", 1))
        await asyncio.to_thread(until, lambda: stub.server.paths["/update_weights_from_disk"])
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update

    stub.server.hangs.discard("/continue_generation")
    engine = start_engine(stub)
    stub.server.hangs.add("/continue_generation")
    asyncio.run(interrupted(engine))
    engine.destroy()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b'{"error": {"message": "the prompt is too long", "code": 400}}', "the prompt is too long"),
        (b'{"object": "error", "message": "no such model"}', "no such model"),
        (b'{"error": "busy"}', "busy"),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"<html>" + b"x" * 600, "<html>" + "x" * 494),
        (b"[1]", "[1]"),
    ],
)
def test_an_error_says_the_servers_message_without_its_json(reply: bytes, says: str) -> None:
    assert server_requests.message_of(reply) == says


def test_a_failed_engine_starts_no_more_groups_when_the_disk_has_caught_up(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), dump_to_file=True)
    engine.fail(ServerError("over"))
    engine._follow_dumper()
    with pytest.raises(ServerError, match="over"):
        engine.wait(1, timeout=1)
    assert not engine._executor.gate.may_start()
