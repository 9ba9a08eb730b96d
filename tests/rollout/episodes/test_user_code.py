"""Packers and workflows are the user's: what they break or change in place harms their own episode alone."""

from __future__ import annotations
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
import pytest
import torch
from areal_lite.api import EpisodeStatus, InferenceEngine, ModelRequest, RolloutWorkflow
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import Group, Trajectory
from areal_lite.data.packer.data_packer import DataPacker
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.data.source.sample import Sample
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError, EpisodeError, StarvationError
from areal_lite.rollout.episodes.row_feed import _FirstRows
from areal_lite.rollout.remote_inf_engine import GroupedRolloutWorkflow, RemoteInfEngine
from tests.rollout.episodes.test_partial_rollout import hold, let_go, rows_of, source_of
from tests.rollout.scripted import OneTurn, tensors_of
from tests.stub_server import StubThread, answer_tokens

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


class PackerOf(DecoderOnlyLLMDataPacker):
    """Refuses some rows, and marks in place those it takes."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad

    def get_rollout_input(self, item: Any) -> Any:
        """Raise, or return the row."""
        if item["n"] in self.bad:
            raise ValueError(f"row {item['n']} has no question")
        item["tags"].append("packed")
        return item


class Scribbler(RolloutWorkflow):
    """Appends to the row's messages, as agents do, after noting how many there were."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Answer; fail the first time."""
        self.seen.append((data["n"], len(data["messages"])))
        data["messages"].append({"role": "assistant"})
        data["messages"][0]["role"] = "mine"
        if len(self.seen) == 1:
            raise KeyError("not yet")
        return await OneTurn().arun_episode(engine, data)


class InPlace(RolloutWorkflow):
    """Builds the second prompt in the list of the first, and shortens the answers it was given."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Run both turns."""
        ids = list(data["ids"])
        first = await engine.agenerate(ModelRequest(input_ids=ids))
        prompt = list(first.input_tokens)
        ids += first.output_tokens
        ids += [5, 6]
        assert first.input_tokens == prompt
        first.input_tokens.clear()
        first.output_tokens.pop()
        return tensors_of(await engine.agenerate(ModelRequest(input_ids=ids)))


def source_with(packer: DataPacker, size: int) -> RolloutDataSource:
    rows = [{"n": n, "ids": [n, n, n], "tags": []} for n in range(1, size + 1)]
    return RolloutDataSource(rows, SourceSettings(packer=packer))


def test_a_packer_that_fails_for_a_row_costs_that_row_alone(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=1, faults={"failed_group_retries": 1})
    source = source_with(PackerOf(3), 4)
    trained = []
    for version in range(1, 5):
        trained += engine.prepare_batch(source, OneTurn)
        engine.update_weights_from_disk("ckpt", version)
    assert rows_of(trained)[:3] == [1, 2, 4]
    assert source.dropped["failed: ValueError"] >= 1
    assert all(result.data["tags"] == ["packed"] for result in trained)


def test_a_packer_that_fails_for_every_row_ends_the_run_with_its_error(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=1, faults={"max_empty_batches": 2})
    with pytest.raises(StarvationError, match="x failed: ValueError: row 1 has no question"):
        engine.prepare_batch(source_with(PackerOf(1), 1), OneTurn)


ONE_BY_ONE: dict[str, Any] = {"max_concurrent_rollouts": 1, "faults": {"failed_group_retries": 0}}


@pytest.mark.parametrize(("members", "rows", "failed"), [(1, 8, 8), (3, 3, 9), (8, 3, 24)])
def test_the_first_rows_that_fail_for_one_cause_end_the_run(
    start_stub: StartStub, start_engine: StartEngine, members: int, rows: int, failed: int
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=20, group_size=members, **ONE_BY_ONE)
    says = f"all {failed} episodes of the first {rows} rows failed: KeyError: 'broken agent'. Nothing was trained"
    with pytest.raises(EpisodeError, match=says):
        engine.prepare_batch([{"do": "raise"}] * 20, OneTurn)
    assert engine.export_stats()["failed"] == rows


def test_a_worker_that_died_counts_once_among_the_first_rows() -> None:
    def group(row: int, message: str) -> Group:
        samples: Any = [SimpleNamespace(group_index=row)]
        status, failure = EpisodeStatus.FAILED, Failure(FailureKind.WORKER, "", message)
        made = Group(task_id=row, group_id=str(row), status=status, data={}, samples=samples, failure=failure)
        made.trajectories = [Trajectory(status=status)] * 4
        return made

    first = _FirstRows()
    assert [first.judge(group(row, "worker 0 was ended")) for row in range(4)] == [None] * 4
    assert first.judge(group(4, "worker 1 was ended")) is None
    assert "the first 3 rows failed" in str(first.judge(group(5, "worker 2 was ended")))


@pytest.mark.parametrize("others", [["raise"] * 7 + ["ok"] + ["raise"] * 8, ["raise", "bad"] * 7 + ["ok"],
                                    ["raise"] * 7 + ["reject"] + ["raise"] * 8 + ["ok"]])  # fmt: skip
def test_rows_may_fail_once_another_has_run_to_its_end_or_for_several_causes(
    start_stub: StartStub, start_engine: StartEngine, others: list[str]
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2, **ONE_BY_ONE)
    assert len(engine.prepare_batch([{"do": do} for do in [*others, "ok"]], OneTurn)) == 2


@pytest.mark.parametrize("members", [1, 3])
def test_what_a_workflow_does_to_its_row_no_sibling_retry_or_result_sees(
    start_stub: StartStub, start_engine: StartEngine, members: int
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2, faults={"on_error": "drop_group"})
    rows = [{"n": n, "messages": [{"role": "user"}]} for n in range(2)]
    source, workflow = RolloutDataSource(rows, SourceSettings(n_samples_per_prompt=members)), Scribbler()
    results = engine.prepare_batch(source, workflow, group_size=members)
    assert sorted(rows_of(results)) == [0, 1]
    assert {count for _, count in workflow.seen} == {1}
    assert all(result.data["messages"] == [{"role": "user"}] for result in results)
    mine = {"n": 9, "messages": [{"role": "user"}]}
    engine.rollout_batch([mine], workflow)
    assert mine["messages"] == [{"role": "user"}]


def test_a_prompt_that_is_extended_in_place_stays_in_the_record_as_it_was_asked(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    hold(stub, lambda ids: len(ids) > 3)  # the second turn
    engine = start_engine(stub, consumer_batch_size=1, mask_offpolicy_in_partial_rollout=True)
    source = source_of(1)
    with ThreadPoolExecutor() as thread:
        batch = thread.submit(engine.prepare_batch, source, InPlace)
        stub.until_held(1)
        engine.close_source(source)
        with pytest.raises(ConfigError, match="the source was closed"):
            batch.result(10)
    ((sample,),) = source.buffer
    first = answer_tokens([1, 1, 1], 0, 8)
    begun = [1, 1, 1, *first, 5, 6]
    begun += answer_tokens(begun, 0, 4)
    assert list(sample.tokens) == begun
    assert [tuple(span) for span in sample.spans] == [(3, 11, "stop"), (13, 17, "abort")]

    let_go(stub)
    asked = len(stub.server.requests)
    engine.update_weights_from_disk("ckpt", 1)
    (result,) = engine.prepare_batch(source, InPlace)
    assert stub.server.requests[asked]["input_ids"] == begun  # the first turn is not asked again
    assert result.trajectory is not None
    assert result.trajectory["input_ids"].tolist() == [begun + answer_tokens(begun, 1, 8)]


def test_a_group_that_a_workflow_makes_itself_is_begun_anew_after_it_was_stopped(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    hold(stub, lambda ids: ids[0] == 1)
    engine = start_engine(stub, consumer_batch_size=1, over_sampling_groups=1)
    source, workflow = source_of(9), GroupedRolloutWorkflow(OneTurn(), 2)
    (result,) = engine.prepare_batch(source, workflow)
    assert (result.data["n"], len(result.rewards), len(result.trajectories)) == (2, 2, 2)
    assert [[sample.status for sample in group] for group in source.buffer] == [["pending"]]
    let_go(stub)
    hold(stub, lambda ids: ids[0] == 3)
    engine.update_weights_from_disk("ckpt", 1)
    (result,) = engine.prepare_batch(source, workflow)
    assert (result.data["n"], len(result.rewards)) == (1, 2)


def test_samples_added_without_an_index_may_fail_and_are_drawn_again(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=1, faults={"failed_group_retries": 1})
    source = source_of(2, members=2)
    source.add_samples([[Sample(row={"n": 7, "do": "raise"}) for _ in range(2)]])
    (result,) = engine.prepare_batch(source, OneTurn, group_size=2)
    assert (result.data["n"], source.dropped) == (1, {"failed: KeyError": 1})
