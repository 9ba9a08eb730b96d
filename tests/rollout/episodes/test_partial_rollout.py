"""Stopped and surplus groups go back to their source with what they sampled, and go on from there."""

from __future__ import annotations
import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
import orjson
import pytest
import torch
from areal_lite.api import GenerationHyperparameters, InferenceEngine, ModelRequest, RolloutWorkflow
from areal_lite.api.engine_api import FilterDecision
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.dynamic_filters import nonzero_reward_std
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.rollout.scripted import OneTurn, tensors_of
from tests.stub_server import StubThread, answer_tokens

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


class AskTwice(RolloutWorkflow):
    """Ask for the row's ids, let the world answer, ask again."""

    def __init__(self, max_new_tokens: int = 100) -> None:
        self.gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Run both turns."""
        first = await engine.agenerate(ModelRequest(input_ids=list(data["ids"]), gconfig=self.gconfig))
        ids = first.input_tokens + first.output_tokens + [5, 6]
        return tensors_of(first, await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig)))


class FailsAtFirst(RolloutWorkflow):
    """Raises the first ``row["failures"]`` times."""

    seen: dict[int, int] = {}

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Count and raise, or answer."""
        self.seen[data["n"]] = self.seen.get(data["n"], 0) + 1
        if self.seen[data["n"]] <= data["failures"]:
            raise KeyError("not yet")
        return await OneTurn().arun_episode(engine, data)


def source_of(size: int, members: int = 1) -> RolloutDataSourceWithBuffer:
    rows = [{"n": n, "ids": [n, n, n]} for n in range(1, size + 1)]
    return RolloutDataSourceWithBuffer(rows, SourceSettings(n_samples_per_prompt=members))


def hold(stub: StubThread, holds: Callable[[list[int]], bool]) -> None:
    def set_hold() -> None:
        stub.server.hold, stub.server.holds = asyncio.Event(), holds

    stub.call(set_hold)


def let_go(stub: StubThread) -> None:
    def clear() -> None:
        assert stub.server.hold is not None
        stub.server.hold.set()
        stub.server.hold = None

    stub.call(clear)


def rows_of(results: list[Any]) -> list[int]:
    return [result.data["n"] for result in results]


def test_s27_surplus_groups_are_stopped_when_the_batch_is_cut_and_kept_with_their_tokens(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    hold(stub, lambda ids: ids[0] in (1, 3))
    engine = start_engine(stub, consumer_batch_size=2, over_sampling_groups=2)
    source = source_of(9)
    batch = engine.prepare_batch(source, OneTurn)
    assert rows_of(batch) == [2, 4]
    assert [(g[0].row["n"], g[0].status) for g in source.buffer] == [(1, "aborted"), (3, "aborted")]
    for (sample,) in source.buffer:
        assert list(sample.tokens) == [sample.row["n"]] * 3 + answer_tokens([sample.row["n"]] * 3, 0, 4)
        assert list(sample.versions) == [-1] * 3 + [0] * 4
        assert sample.spans[0].stop_reason == "abort"
    assert engine.export_stats() == {
        "accepted": 2,
        "rejected": 0,
        "failed": 0,
        "cancelled": 2,
        "abandoned": 0,
    }


def test_sb18_a_resumed_answer_keeps_its_tokens_and_masks_those_of_an_older_policy(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    hold(stub, lambda ids: ids[0] in (1, 3))
    engine = start_engine(stub, consumer_batch_size=2, over_sampling_groups=2, mask_offpolicy_in_partial_rollout=True)
    source = source_of(9)
    engine.prepare_batch(source, OneTurn)
    let_go(stub)
    asked = len(stub.server.requests)
    engine.update_weights_from_disk("ckpt", 1)
    batch = engine.prepare_batch(source, OneTurn)
    by_row = {result.data["n"]: result for result in batch}
    assert set(by_row) == {1, 3}  # what was stopped is drawn before new rows
    for row, result in by_row.items():
        assert result.trajectory is not None
        begun = [row] * 3 + answer_tokens([row] * 3, 0, 4)
        assert result.trajectory["input_ids"].tolist() == [begun + answer_tokens(begun, 1, 8)]
        assert result.trajectory["versions"].tolist() == [[-1] * 3 + [0] * 4 + [1] * 8]
        assert result.trajectory["loss_mask"].tolist() == [[0] * 7 + [1] * 8]
        assert (result.head_version, result.tail_version) == (1, 1)
    resumed = {body["input_ids"][0]: body for body in stub.server.requests[asked:]}
    assert resumed[1]["input_ids"] == [1] * 3 + answer_tokens([1] * 3, 0, 4)
    assert resumed[1]["sampling_params"]["max_new_tokens"] == 4096 - 3 - 4  # of the stub's window


def test_without_the_mask_an_answer_of_an_older_policy_is_begun_anew_on_policy(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    hold(stub, lambda ids: ids[0] == 1)
    engine = start_engine(stub, consumer_batch_size=1, over_sampling_groups=1)
    source = source_of(9)
    assert rows_of(engine.prepare_batch(source, OneTurn)) == [2]
    let_go(stub)
    hold(stub, lambda ids: ids[0] == 3)
    engine.update_weights_from_disk("ckpt", 1)
    (result,) = engine.prepare_batch(source, OneTurn)
    assert (result.data["n"], result.head_version, result.tail_version) == (1, 1, 1)


def test_s26_a_stopped_conversation_goes_on_in_another_process_from_its_tokens(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    stub = start_stub()
    hold(stub, lambda ids: len(ids) > 3)  # the second turn
    engine = start_engine(stub, consumer_batch_size=1, max_head_offpolicyness=1)
    source = source_of(1, members=2)
    with ThreadPoolExecutor() as thread:
        batch = thread.submit(engine.prepare_batch, source, AskTwice, group_size=2)
        stub.until_held(4)
        engine.close_source(source)
        with pytest.raises(ConfigError, match="the source was closed while a batch was waited for"):
            batch.result(10)
    source.save(1, tmp_path)
    begun = [1] * 3 + answer_tokens([1] * 3, 0, 8) + [5, 6]
    begun += answer_tokens(begun, 0, 4)

    let_go(stub)
    asked = stub.server.seen["generate"]
    engine.update_weights_from_disk("ckpt", 1)
    resumed = source_of(1, members=2)
    resumed.load(1, tmp_path)
    assert [s.status for s in resumed.buffer[0]] == ["aborted"] * 2
    (result,) = engine.prepare_batch(resumed, AskTwice, group_size=2)
    assert result.trajectory is not None
    assert result.trajectory["input_ids"].tolist() == [begun + answer_tokens(begun, 1, 8)] * 2
    assert result.trajectory["versions"][0].tolist() == [-1] * 3 + [0] * 8 + [-1] * 2 + [0] * 4 + [1] * 8
    assert result.trajectory["loss_mask"][0].tolist() == [0] * 3 + [1] * 8 + [0] * 2 + [1] * 12
    assert stub.server.seen["generate"] >= asked + 2
    again = [body["input_ids"] for body in stub.server.requests[asked : asked + 2]]
    assert again == [begun] * 2  # the first turns were not sampled again


@pytest.mark.parametrize("stale_groups", ["wait", "redraw"])
def test_sb17_finished_surplus_groups_are_accepted_later_without_generation(
    start_stub: StartStub, start_engine: StartEngine, stale_groups: str
) -> None:
    stub = start_stub()
    engine = start_engine(
        stub, consumer_batch_size=1, max_head_offpolicyness=3, over_sampling_groups=2, stale_groups=stale_groups
    )
    source = source_of(9)
    first = engine.prepare_batch(source, AskTwice)
    while engine._executor.runner.live:
        engine.rollout_batch([], OneTurn)
    engine.close_source(source)
    statuses = [g[0].status for g in source.buffer]
    kept = [g[0].row["n"] for g in source.buffer]
    assert len(kept) >= 3
    assert engine.export_stats()["cancelled"] == len(kept)
    assert set(statuses) == {"completed"}
    assert all(g[0].reward == 1.0 for g in source.buffer)
    asked = stub.server.seen["generate"]
    results = [result for _ in range(3) for result in engine.prepare_batch(source, AskTwice)]
    engine.close_source(source)
    assert sorted(rows_of(first) + rows_of(results)) == [1, 2, 3, 4]
    assert [body for body in stub.server.requests[asked:] if body["input_ids"][0] in kept] == []


def test_sb18_no_tokens_left_ends_an_answer_by_length_without_a_request(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    hold(stub, lambda ids: True)
    engine = start_engine(stub, consumer_batch_size=1, max_head_offpolicyness=1)
    source = source_of(1)
    (group,) = source.get_samples(1)
    group[0].append([1, 1, 1])
    group[0].append([7, 8], sampled=True, logprobs=[-1.0, -2.0], versions=[0, 0], stop_reason="abort")
    source.give_back([group])

    class Short(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
            gconfig = GenerationHyperparameters(max_new_tokens=2)
            response = await engine.agenerate(ModelRequest(input_ids=[1, 1, 1], gconfig=gconfig))
            assert response.stop_reason == "length"
            return tensors_of(response)

    (result,) = engine.prepare_batch(source, Short)
    assert result.trajectory is not None
    assert result.trajectory["input_ids"].tolist() == [[1, 1, 1, 7, 8]]
    assert result.trajectory["logprobs"].tolist() == [[0, 0, 0, -1, -2]]


def test_an_episode_that_asks_something_else_goes_its_own_way(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=1, max_head_offpolicyness=0)
    source = source_of(1)
    (group,) = source.get_samples(1)
    group[0].append([4, 4])
    group[0].append([7], sampled=True, logprobs=[-1.0], versions=[0])
    source.give_back([group])
    (result,) = engine.prepare_batch(source, OneTurn)
    assert result.trajectory is not None
    assert result.trajectory["input_ids"].tolist() == [[1, 1, 1, *answer_tokens([1, 1, 1], 0, 8)]]


def test_a_failed_group_is_drawn_again_as_often_as_the_config_says(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    FailsAtFirst.seen = {}
    engine = start_engine(start_stub(), consumer_batch_size=2, faults={"failed_group_retries": 1})
    rows = [{"n": 0, "failures": 9}, {"n": 1, "failures": 1}, {"n": 2, "failures": 0}]
    source = RolloutDataSource(rows)
    batch = engine.prepare_batch(source, FailsAtFirst)
    assert sorted(rows_of(batch)) == [1, 2]
    assert FailsAtFirst.seen == {0: 2, 1: 2, 2: 1}
    assert source.dropped == {"failed: KeyError": 1}


def test_a_batch_is_owed_until_it_is_trained_or_the_next_one_is_asked_for(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2)
    source = source_of(9)
    first = engine.prepare_batch(source, OneTurn)
    assert source.num_owed == 2
    source.mark_trained([result.samples for result in first])
    assert source.num_owed == 0
    engine.update_weights_from_disk("ckpt", 1)
    engine.prepare_batch(source, OneTurn)
    assert source.num_owed == 2
    engine.update_weights_from_disk("ckpt", 2)
    engine.prepare_batch(source, OneTurn)
    assert source.num_owed == 2


def test_a_source_decides_the_size_of_its_groups(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=1)
    (result,) = engine.prepare_batch(source_of(2, members=2), OneTurn)
    assert len(result.trajectories) == 2
    with pytest.raises(ConfigError, match="gives groups of 2 and group_size is 3"):
        engine.prepare_batch(source_of(2, members=2), OneTurn, group_size=3)


def test_a_filters_reason_is_counted_as_what_dropped_the_group(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=1)
    source = RolloutDataSource([{"reward": 0.0}, {"reward": 1.0}])
    (result,) = engine.prepare_batch(source, OneTurn, should_accept_fn=refuse_zero)
    assert result.rewards == [1.0]
    assert source.dropped == {"should_accept_fn said no: no reward": 1}


def refuse_zero(trajectory: dict[str, Any]) -> FilterDecision:
    return FilterDecision(bool(trajectory["rewards"].sum() > 0), "no reward")


def test_groups_whose_rewards_are_equal_say_nothing() -> None:
    assert nonzero_reward_std({"rewards": torch.tensor([0.0, 1.0])}) == (True, "")
    assert nonzero_reward_std({"rewards": torch.tensor([1.0, 1.0])}) == (False, "all rewards are 1")
    equal = {"episode_rewards": [0.1] * 4, "member_idx": [0, 0, 0, 1]}  # their means are not: 0.1 and 0.1 + 1e-17
    assert nonzero_reward_std(equal) == (False, "all rewards are 0.1")


def test_a_stopped_group_survives_json_whole(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub()
    hold(stub, lambda ids: ids[0] == 1)
    engine = start_engine(stub, consumer_batch_size=1, over_sampling_groups=1)
    source = source_of(3)
    (result,) = engine.prepare_batch(source, OneTurn)
    (recorded,) = result.sequences
    assert recorded.input_ids.tolist() == [2, 2, 2, *answer_tokens([2, 2, 2], 0, 8)]
    state = orjson.loads(orjson.dumps(source.state_dict()))
    again = source_of(3)
    again.load_state_dict(state)
    assert [s.to_dict() for s in again.buffer[0]] == [s.to_dict() for s in source.buffer[0]]
