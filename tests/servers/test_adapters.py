"""Adapters pushed alone to servers that hold several by name, as SGLang and vLLM do."""

from __future__ import annotations
import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import pytest
from areal_lite.config.trainer_config import AdapterShape
from areal_lite.errors import ServerError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.dialects import dialect_of
from areal_lite.servers.weights.published_weights import WeightFolder
from tests.servers.pool.test_server_faults import generate, servers
from tests.stub_server import StubThread

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]
SHAPE = AdapterShape(12, ("o_proj", "q_proj"))


def adapters(version: int) -> WeightFolder:
    return WeightFolder(f"weights/v{version}", version, SHAPE)


@pytest.mark.parametrize(("rank", "flag"), [(1, 1), (8, 8), (9, 16), (512, 512), (600, 600)])
def test_vllm_is_started_with_the_smallest_rank_it_knows_that_is_enough(rank: int, flag: int) -> None:
    assert dialect_of("vllm").adapter_flags(AdapterShape(rank, ("q_proj",)))["max-lora-rank"] == flag


def started(start_stub: StartStub) -> StubThread:
    stub = start_stub()
    stub.server.adapters = {"other": "kept", "areal-lite-7-aa": "of a run that ended"}
    return stub


def test_requests_name_the_newest_adapter_and_older_ones_are_unloaded(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = started(start_stub)
    engine = start_engine(stub)
    generate(engine)
    for version in (1, 2):
        engine.update_weights(adapters(version))
        answer = generate(engine)
        assert set(answer.output_versions) == {version}
        name = servers(engine)[0].adapter
        assert name is not None
        assert stub.server.adapters == {"other": "kept", name: f"weights/v{version}"}
    assert "lora_path" not in stub.server.requests[0]
    assert [request["lora_path"][:13] for request in stub.server.requests[1:]] == ["areal-lite-1-", "areal-lite-2-"]
    assert stub.server.seen["update"] == 0
    engine.update_weights_from_disk("whole", 3)
    generate(engine)
    assert "lora_path" not in stub.server.requests[-1]


def test_tokens_have_the_version_of_the_adapter_that_their_request_named(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = started(start_stub)
    engine = start_engine(stub)
    engine.update_weights(adapters(1))
    engine.update_weights(adapters(2))
    stub.server.version = "1"  # a server's label is of its newest adapter at some time, not of a request's
    answer = generate(engine)
    assert (set(answer.output_versions), answer.attempts) == ({2}, 1)


def test_a_server_that_lost_its_adapters_gets_the_newest_before_it_answers(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = started(start_stub)
    engine = start_engine(stub)
    engine.update_weights(adapters(0))  # a restarted server reports the version 0 too
    assert stub.server.adapters is not None
    stub.call(stub.server.adapters.clear)
    answer = generate(engine)
    assert set(answer.output_versions) == {0}
    assert list(stub.server.adapters.values()) == ["weights/v0"]


@pytest.mark.parametrize(("alone", "expected"), [(True, {1}), (False, {2})])
def test_an_answer_that_stays_on_its_server_over_an_update_is_no_fault(
    start_stub: StartStub, start_engine: StartEngine, alone: bool, expected: set[int]
) -> None:
    """Adapters stay as long as they are used; the server labels what it ends under the newest version."""
    stub = started(start_stub)
    engine = start_engine(stub)

    def update(version: int) -> None:
        engine.update_weights(adapters(version) if alone else WeightFolder("whole", version))

    update(1)
    stub.call(lambda: setattr(stub.server, "hold", asyncio.Event()))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine, regex="a+")
        stub.until_held(1)
        update(2)
        if alone:
            assert list((stub.server.adapters or {}).values()) == ["kept", "weights/v1", "weights/v2"]
        stub.call(lambda: stub.server.hold.set())  # type: ignore[union-attr]
        answer = running.result(10)
    assert (set(answer.output_versions), answer.attempts) == (expected, 1)
    if alone:
        update(3)
        assert list((stub.server.adapters or {}).values()) == ["kept", "weights/v3"]


def test_a_failed_load_is_tried_again_under_another_name(start_stub: StartStub, start_engine: StartEngine) -> None:
    stubs = started(start_stub), started(start_stub)
    engine = start_engine(*stubs)
    stubs[0].server.refuses.add("/update_weight_version")  # after the adapter was loaded
    engine.update_weights(adapters(1))
    stubs[0].server.refuses.clear()
    for _ in range(200):
        generate(engine)
        if stubs[0].server.requests:
            break
    assert [list(stub.server.adapters or {})[1:] for stub in stubs] == [[s.adapter] for s in servers(engine)]


def test_a_server_without_adapters_is_an_error_that_names_the_flags(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub())
    flags = "--enable-lora --max-lora-rank 12 --lora-target-modules o_proj q_proj"
    with pytest.raises(ServerError, match=f"LoRA is not enabled.*servers that were started with {flags}"):
        engine.update_weights(adapters(1))
    assert set(generate(engine).output_versions) == {0}


def test_vllm_has_a_few_ranks_to_choose_from() -> None:
    assert dialect_of("vllm").adapter_flags(SHAPE)["max-lora-rank"] == 16
