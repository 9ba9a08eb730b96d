"""What many servers, waiting requests, turns and episodes must not cost: counted, not timed."""

from __future__ import annotations
import asyncio
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any
import pytest
from areal_lite.api import InferenceEngineConfig, ModelRequest
from areal_lite.api.episode_context import Episode
from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.data.source.sample import Sample
from areal_lite.rollout.episodes.ended_groups import Scalars
from areal_lite.rollout.episodes.partial_rollout import record_answers
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.client.engine_client import EngineClient
from areal_lite.servers.dialects.dialect import Chunk, ServerInfo
from areal_lite.servers.pool import reconciler, server_pool
from areal_lite.servers.weights.published_weights import WeightFolder
from tests.rollout.scripted import OneTurn, on_a_loop, tensors_of
from tests.stub_server import StubThread

SERVERS = 100


def make_client(monkeypatch: pytest.MonkeyPatch) -> EngineClient:
    """Return a client whose servers take one turn of the loop more than the one before, without a network."""
    client = EngineClient(InferenceEngineConfig(backend="sglang", addresses=[f"s:{i}" for i in range(SERVERS)]))
    requests = client.requests

    async def take(server: server_pool.Server, *_: Any, **__: Any) -> Any:
        for _ in range(1 + server.index):
            await asyncio.sleep(0)

    async def info(server: server_pool.Server) -> ServerInfo:
        await take(server)
        return ServerInfo(version=requests.limits.newest_version)

    async def generate(*_: Any, **__: Any) -> Chunk:
        # All come back before the first answer.
        while any(server.state == "down" for server in client.pool.servers):  # noqa: ASYNC110 -- nothing else tells
            await asyncio.sleep(0)
        return Chunk([1], [0.0], [0], "stop")

    monkeypatch.setattr(requests, "control", take)
    monkeypatch.setattr(requests, "info", info)
    monkeypatch.setattr(requests, "generate", generate)
    return client


@on_a_loop
async def test_a_weight_update_looks_at_each_server_a_few_times() -> None:
    looked_at = 0

    async def wait(tasks: Iterable[asyncio.Task[None]], **options: Any) -> Any:
        nonlocal looked_at
        looked_at += len(list(tasks))
        return await asyncio_wait(tasks, **options)

    with pytest.MonkeyPatch.context() as patch:
        client = make_client(patch)
        asyncio_wait = asyncio.wait
        patch.setattr(reconciler.asyncio, "wait", wait)
        await client.update_weights(WeightFolder("folder", 1))
    assert {server.version for server in client.pool.servers} == {1}
    assert looked_at <= 3 * SERVERS


@on_a_loop
async def test_each_server_that_comes_back_wakes_as_many_requests_as_it_takes() -> None:
    picks = 0

    def pick(**options: Any) -> Any:
        nonlocal picks
        picks += 1
        return pool_pick(**options)

    with pytest.MonkeyPatch.context() as patch:
        client = make_client(patch)
        pool_pick = client.pool.pick
        patch.setattr(client.pool, "pick", pick)
        for server in client.pool.servers:
            client._reconciler.failed(server, "gone", at_once=True)
        requests = [asyncio.create_task(client.generate(ModelRequest(input_ids=[1]))) for _ in range(500)]
        await asyncio.wait(requests)
        await client._reconciler.close()
    assert all(request.result().output_tokens == [1] for request in requests)
    assert picks <= 3 * 500


@pytest.mark.parametrize("router", [None, "r:1"])
def test_a_server_is_asked_whether_an_answer_must_stay_without_a_look_at_all_calls(router: str | None) -> None:
    config = InferenceEngineConfig(backend="sglang", addresses=["s:0", "s:1"], router=router)
    client = EngineClient(config)
    first, second = client.pool.servers
    target = first if router is None else client.gate.pool.servers[0]
    client.gate.pool.start(target, 10, 0.0, adapter="a-1", stays=True)
    client.gate.pool.start(target, 10, 0.0, adapter="a-1")
    assert [client.gate.must_stay(one) for one in (first, second)] == [True, router is not None]
    assert list(target.adapters_in_use) == ["a-1"]
    client.gate.pool.end(target, 10, adapter="a-1", stays=True)
    assert [client.gate.must_stay(one) for one in (first, second)] == [False, False]
    assert list(target.adapters_in_use) == ["a-1"]
    client.gate.pool.end(target, 10, adapter="a-1")
    assert not target.adapters_in_use


class CountedList(list[int]):
    """Counts the ids that are read from it."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        values = super().__getitem__(place)
        self.reads += len(values) if isinstance(place, slice) else 1
        return values


def test_the_end_of_a_conversation_reads_its_ids_once() -> None:
    ids = CountedList(range(4000))
    calls = [
        SharedPromptResponse.of(
            ModelResponse(
                input_tokens=[],
                output_tokens=list(range(start, start + 5)),
                output_logprobs=[0.0] * 5,
                output_versions=[0] * 5,
                rid=str(start),
            ),
            TokenPrefix(ids, start),
        )
        for start in range(10, 3995, 10)
    ]
    trajectory = trajectory_of(tensors_of(*calls), calls)
    ids.reads = 0
    assert sum(turn.role == "assistant" for turn in trajectory.turns) == len(calls)
    assert ids.reads <= 2 * len(ids)


def test_the_answers_of_a_stopped_conversation_share_its_ids() -> None:
    sample = Sample(0)
    for turn in range(3):
        sample.append([turn] * 4)
        sample.append([9, turn], logprobs=[0.0, 0.0], versions=[1, 1], sampled=True, stop_reason="stop")
    episode = Episode()
    record_answers([sample], [episode], oldest_version=0)
    answers = [answer for answers in episode.recorded.values() for answer in answers]
    assert [answer.input_tokens for answer in answers] == [sample.tokens[:end] for end in (4, 10, 16)]
    assert [answer.output_tokens for answer in answers] == [[9, 0], [9, 1], [9, 2]]
    assert len({id(answer.prompt.ids) for answer in answers}) == 1


def test_numbers_that_nobody_takes_need_no_memory() -> None:
    scalars = Scalars()

    def add(count: int) -> None:
        for number in range(count):
            trajectory = Trajectory(status=EpisodeStatus.ACCEPTED, scalars=[("a", float(number))])
            accepted = EpisodeStatus.ACCEPTED
            scalars.add(Group(task_id=0, group_id="0", status=accepted, data={}, trajectories=[trajectory]))

    add(10)
    tracemalloc.start()
    try:
        add(5000)
        assert tracemalloc.get_traced_memory()[0] < 20_000
    finally:
        tracemalloc.stop()
    assert scalars.take(is_eval=False) == {"a": (sum(range(10)) + sum(range(5000))) / 5010}
    assert scalars.take(is_eval=False) == {}


def test_batches_retries_and_weight_updates_leave_no_cyclic_garbage(
    start_stub: Callable[..., StubThread], start_engine: Callable[..., RemoteInfEngine]
) -> None:
    stub = start_stub(fault=lambda n: {0: "500", 20: "lengths"}.get(n % 40))
    engine = start_engine(stub, consumer_batch_size=4, max_head_offpolicyness=1)
    rows = [{"n": n} for n in range(8)]

    def train(first: int, last: int) -> None:
        for version in range(first, last):
            engine.prepare_batch(rows, OneTurn)
            engine.rollout_batch(
                [{"do": do} for do in ("reject", "raise", "exit", "bad", "odd")], OneTurn, group_size=2
            )
            engine.update_weights_from_disk("folder", version)

    train(1, 4)  # warms up
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        train(4, 14)
        gc.collect()
        garbage = gc.garbage.copy()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not any(isinstance(one, Episode) for one in garbage)
    assert sum(map(sys.getsizeof, garbage)) < 200_000  # that of each class's signature is 50 KB
