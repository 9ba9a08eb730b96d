"""Every submitted episode ends exactly once; batches keep the staleness bound; nothing waits for ever."""

from __future__ import annotations
import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import pytest
from areal_lite.utils import stats_tracker
from areal_lite.api import EpisodeStatus, InferenceEngine, RolloutWorkflow
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.errors import ConfigError, EpisodeError, ServerError, StarvationError, StorageError
from areal_lite.rollout import engine_lifecycle, workflow_context
from areal_lite.rollout.episodes import group_runner
from areal_lite.rollout.remote_inf_engine import GroupedRolloutWorkflow, RemoteInfEngine
from tests.rollout.episodes.test_partial_rollout import hold, let_go, source_of
from tests.rollout.scripted import OneTurn, TwoTurns, until
from tests.stub_server import StubThread

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


@pytest.fixture
def engine(start_stub: StartStub, start_engine: StartEngine) -> RemoteInfEngine:
    return start_engine(start_stub(), consumer_batch_size=4, max_head_offpolicyness=100)


ENDS = {
    "ok": "accepted",
    "reject": "rejected",
    "raise": "failed",
    "exit": "failed",
    "self-cancel": "failed",
    "bad": "failed",
}


def test_each_episode_ends_once_with_its_own_status_and_cause(engine: RemoteInfEngine) -> None:
    rows = [{"do": list(ENDS)[i % len(ENDS)], "n": i} for i in range(300)]
    ids = [engine.submit(row, OneTurn()) for row in rows]
    results = engine.wait(len(rows), timeout=30)
    assert sorted(r.task_id for r in results) == ids  # type: ignore[type-var]
    for result in results:
        assert result.status == ENDS[result.data["do"]]
        assert (result.trajectory is not None) == (result.status == "accepted")
    errors = {r.data["do"]: r.error or "" for r in results}
    assert "KeyError: 'broken agent'" in errors["raise"]
    assert "SystemExit" in errors["exit"] and "cancelled itself" in errors["self-cancel"]
    assert "attention_mask" in errors["bad"]
    expected = Counter(ENDS[row["do"]] for row in rows)
    assert {k: v for k, v in engine.export_stats().items() if v} == dict(expected)


def test_rollout_batch_gives_one_result_per_row_in_order_whatever_happened(engine: RemoteInfEngine) -> None:
    rows = [{"do": do} for do in ENDS] * 5
    results = engine.rollout_batch(rows, OneTurn)
    assert [r.data for r in results] == rows
    assert [r.status for r in results] == [ENDS[row["do"]] for row in rows]
    assert engine.rollout_batch([], OneTurn) == []
    assert [r.data["n"] for r in engine.rollout_batch(({"n": n} for n in range(3)), OneTurn)] == [0, 1, 2]  # type: ignore[arg-type]


def test_rollout_batch_is_not_held_by_the_staleness_bound(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=1, max_head_offpolicyness=0, max_concurrent_rollouts=3)
    assert len(engine.rollout_batch([{}] * 20, OneTurn)) == 20


def test_a_timed_out_wait_loses_nothing(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub()
    stub.call(lambda: setattr(stub.server, "hold", asyncio.Event()))
    engine = start_engine(stub, consumer_batch_size=8)
    for i in range(3):
        engine.submit({"do": "ok" if i else "raise"}, OneTurn())
    with pytest.raises(TimeoutError, match="1 of 3 episodes ended"):
        engine.wait(3, timeout=0.2)
    assert engine.wait(3, timeout=0.01, raise_timeout=False) == []
    stub.call(lambda: stub.server.hold.set())  # type: ignore[union-attr]
    assert Counter(r.status for r in engine.wait(3, timeout=10)) == {"accepted": 2, "failed": 1}


def test_a_wait_for_more_than_was_submitted_is_refused_at_once(engine: RemoteInfEngine) -> None:
    engine.submit({}, OneTurn())
    with pytest.raises(ValueError, match="only 1 submissions are left"):
        engine.wait(2)
    assert len(engine.wait(1)) == 1
    with pytest.raises(ValueError, match="only 0 submissions are left"):
        engine.wait(1)


def test_a_task_id_in_use_is_refused_and_the_engine_goes_on(engine: RemoteInfEngine) -> None:
    engine.submit({"do": "hang"}, OneTurn(), task_id="mine")
    with pytest.raises(ConfigError, match="'mine' has not ended yet"):
        engine.submit({}, OneTurn(), task_id="mine")
    with pytest.raises(ConfigError, match="names a file"):
        engine.submit({}, OneTurn(), task_id="../x")
    engine.submit({}, OneTurn(), task_id=7)
    assert engine.submit({}, OneTurn()) == 8
    assert {r.task_id for r in engine.wait(2, timeout=10)} == {7, 8}


def test_an_episode_over_its_deadline_fails_also_if_it_swallows_the_cancel(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_runner, "CANCEL_GRACE_S", 0.05)
    release = threading.Event()

    class Stubborn(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
            while not release.is_set():
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if release.is_set():
                        raise

    engine = start_engine(start_stub(), consumer_batch_size=2, faults={"episode_timeout_s": 0.05})
    engine.submit({"do": "hang"}, OneTurn())
    engine.submit({}, Stubborn())
    results = engine.wait(2, timeout=10)
    assert [r.status for r in results] == ["failed", "failed"]
    assert all("episode_timeout_s=0.05" in (r.error or "") for r in results)
    assert engine.export_stats()["abandoned"] == 1
    release.set()


def test_destroy_ends_what_runs_and_what_waits_as_cancelled(start_stub: StartStub, start_engine: StartEngine) -> None:
    ended = []
    engine = start_engine(start_stub(), max_concurrent_rollouts=2, consumer_batch_size=8)
    engine._on_end = ended.append  # type: ignore[assignment,method-assign]
    engine._executor.ended.on_end = ended.append
    for _ in range(5):
        engine.submit({"do": "hang"}, OneTurn())
    assert engine._loop is not None
    thread = engine._loop.thread
    engine.destroy()
    assert [r.status for r in ended] == [EpisodeStatus.CANCELLED] * 5
    assert not thread.is_alive()


def test_destroy_starts_no_group_in_the_place_of_one_that_it_stops(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2, max_head_offpolicyness=4)
    rows = ({"do": "ok" if n < 2 else "hang"} for n in range(100))
    engine.prepare_batch(rows, OneTurn)
    assert engine._executor.runner.live
    engine.destroy()
    assert not engine._executor.runner.live
    assert engine.export_stats()["abandoned"] == 0


def test_the_end_of_a_batch_is_noticed_while_another_group_runs_on(engine: RemoteInfEngine) -> None:
    engine.submit({"do": "hang"}, OneTurn(), is_eval=True)
    assert len(engine.rollout_batch([{}] * 3, OneTurn)) == 3


def test_a_batch_that_is_cut_stops_no_group_of_another_caller(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub())
    engine.submit({"do": "hang"}, OneTurn(), is_eval=True)
    engine.prepare_batch([{}], OneTurn)
    assert engine.export_stats()["cancelled"] == 0


# -- groups ------------------------------------------------------------------------------------


def test_a_group_is_one_trajectory_with_a_row_per_member(engine: RemoteInfEngine) -> None:
    (result,) = engine.rollout_batch([{"ids": [1, 2]}], OneTurn, group_size=4)
    assert result.trajectory is not None
    assert result.trajectory["input_ids"].shape == (4, 10)
    assert [t.member_idx for t in result.trajectories] == [0, 1, 2, 3]
    assert all(len(t.sequences) == 1 for t in result.trajectories)
    assert all([turn.role for turn in t.turns] == ["prompt", "assistant"] for t in result.trajectories)


@pytest.mark.parametrize(
    ("policy", "status", "rows"),
    [("drop_episode", "accepted", 2), ("drop_group", "failed", 0), ("raise", "failed", 0)],
)
def test_a_failing_member_is_handled_as_on_error_says(
    start_stub: StartStub, start_engine: StartEngine, policy: str, status: str, rows: int
) -> None:
    engine = start_engine(start_stub(), faults={"on_error": policy})
    (result,) = engine.rollout_batch([{"do": "odd"}], OneTurn, group_size=4)
    assert result.status == status
    assert len(result.rewards) == rows
    assert "odd member" in getattr(result.trajectories[1].failure, "text", "")


def test_no_sibling_is_left_running_after_a_group_was_dropped() -> None:
    running: set[int] = set()

    class Watch(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
            index = workflow_context.get().member_idx
            running.add(index)
            try:
                if index == 3:
                    raise ValueError("fourth")
                await asyncio.Event().wait()
            finally:
                running.discard(index)

    async def main() -> None:
        group = GroupedRolloutWorkflow(Watch(), 4, "drop_group")
        assert await group.arun_episode(None, {}) is None  # type: ignore[arg-type]
        assert not running
        with pytest.raises(ValueError, match="fourth"):
            await GroupedRolloutWorkflow(Watch(), 4, "raise").arun_episode(None, {})  # type: ignore[arg-type]
        assert not running

    asyncio.run(main())


def test_a_group_whose_members_all_refuse_is_rejected_and_all_fail_is_failed(engine: RemoteInfEngine) -> None:
    rejected, failed = engine.rollout_batch([{"do": "reject"}, {"do": "raise"}], OneTurn, group_size=3)
    assert (rejected.status, failed.status) == ("rejected", "failed")


def test_group_size_below_one_is_refused(engine: RemoteInfEngine) -> None:
    with pytest.raises(ConfigError, match="group_size is 0"):
        engine.submit({}, OneTurn(), group_size=0)


# -- context -----------------------------------------------------------------------------------


def test_thousands_of_concurrent_episodes_each_see_their_own_context(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=1000)
    barrier: dict[str, asyncio.Event] = {}
    arrived = Counter[str]()

    class Look(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
            before = workflow_context.get()
            everyone = barrier.setdefault("all", asyncio.Event())
            arrived["all"] += 1
            if arrived["all"] == 4000:
                everyone.set()
            await everyone.wait()
            after = await asyncio.ensure_future(self.child())
            assert after is before is workflow_context.get()
            assert after.is_eval == data["eval"]
            assert workflow_context.stat_scope() == ("eval-rollout" if data["eval"] else "rollout")
            from areal_lite.api import ModelResponse
            from tests.rollout.scripted import tensors_of

            return tensors_of(
                ModelResponse(
                    input_tokens=[int(str(after.task_id)), after.member_idx],
                    output_tokens=[1],
                    output_logprobs=[-1.0],
                    output_versions=[after.version],
                )
            )

        async def child(self) -> workflow_context.WorkflowContext:
            return workflow_context.get()

    for i in range(2000):
        engine.submit({"eval": i % 2 == 1}, Look(), group_size=2, is_eval=i % 2 == 1)
    seen = set()
    for result in engine.wait(2000, timeout=60):
        assert result.trajectory is not None, result.error
        assert result.group_id == str(result.task_id)
        rows = result.trajectory["input_ids"][:, :2].tolist()
        assert rows == [[result.task_id, 0], [result.task_id, 1]]
        seen.add(result.task_id)
    assert len(seen) == 2000
    assert workflow_context.get().task_id is None


def test_shared_http_clients_are_one_per_engine_and_refused_outside(engine: RemoteInfEngine) -> None:
    found: list[Any] = []

    class Fetch(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
            found.append((await workflow_context.get_aiohttp_session(), await workflow_context.get_httpx_client()))

    engine.rollout_batch([{}, {}], Fetch)
    assert found[0] == found[1]
    with pytest.raises(RuntimeError, match="inside an episode only"):
        asyncio.run(workflow_context.get_aiohttp_session())


# -- batches -----------------------------------------------------------------------------------


def test_prepare_batch_gives_exactly_the_batch_and_generation_goes_on_between_calls(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(
        start_stub(), consumer_batch_size=4, max_head_offpolicyness=1, max_concurrent_rollouts=1
    )  # one after another, so that they end in their order
    rows = [{"n": n} for n in range(5)]
    first = engine.prepare_batch(rows, OneTurn)
    assert [r.data["n"] for r in first] == [0, 1, 2, 3]
    engine.update_weights_from_disk("ckpt", 1)
    second = engine.prepare_batch(rows, OneTurn)
    assert [r.data["n"] for r in second] == [4, 0, 1, 2]  # the list begins anew
    assert all(r.status == "accepted" for r in first + second)


def test_on_policy_no_episode_starts_before_the_weights_are_new(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    engine = start_engine(stub, consumer_batch_size=4, max_head_offpolicyness=0)
    rows = [{"n": n} for n in range(100)]
    for version in range(5):
        batch = engine.prepare_batch(rows, OneTurn)
        assert {r.head_version for r in batch} == {version}
        assert stub.server.seen["generate"] == 4 * (version + 1)
        engine.update_weights_from_disk("ckpt", version + 1)


def test_a_result_that_grew_too_old_is_not_trained_and_its_row_is_drawn_again(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2, max_head_offpolicyness=1)
    rows = iter([{"n": n} for n in range(40)])
    seen = [r.data["n"] for r in engine.prepare_batch(rows, OneTurn)]  # runs ahead under version 0
    for version in (1, 2, 3):
        engine.update_weights_from_disk("ckpt", version)
    for version in range(3, 15):
        batch = engine.prepare_batch(rows, OneTurn)
        for result in batch:
            assert result.head_version is not None and version - result.head_version <= 1
        seen += [r.data["n"] for r in batch]
        engine.update_weights_from_disk("ckpt", version + 1)
    assert len(seen) == len(set(seen))
    assert set(range(10)) <= set(seen)  # rows 2 to 5 grew stale and came again
    assert engine.export_stats()["rejected"] >= 1


def test_a_filter_may_be_named_by_path_and_rejects_whole_groups(engine: RemoteInfEngine) -> None:
    rows = ({"reward": n % 2} for n in range(100))
    batch = engine.prepare_batch(rows, OneTurn, should_accept_fn=f"{__name__}.rewarded", group_size=2)
    assert all(r.rewards == [1.0, 1.0] for r in batch)


async def waiting_filter(trajectory: dict[str, Any]) -> bool:
    return False


def test_what_cannot_filter_is_refused(engine: RemoteInfEngine) -> None:
    rows = [{}]
    for wrong in ("nowhere.f", 3, waiting_filter):
        with pytest.raises(ConfigError, match=f"should_accept_fn is {re.escape(repr(wrong))}"):
            engine.prepare_batch(rows, OneTurn, should_accept_fn=wrong)  # type: ignore[arg-type]


def rewarded(trajectory: dict[str, Any]) -> bool:
    """Accept groups with a reward."""
    return bool(trajectory["rewards"].sum() > 0)


def test_when_nothing_is_accepted_the_run_stops_with_the_reasons_counted(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(
        start_stub(), consumer_batch_size=4, faults={"max_empty_batches": 3, "failed_group_retries": 0}
    )
    rows = [{"do": "raise"}, {"do": "reject"}, {"do": "raise"}]
    with pytest.raises(StarvationError) as caught:
        engine.prepare_batch(rows, OneTurn)
    missed = re.match(r"no batch of 4 groups: (\d+) groups ended", str(caught.value))
    assert missed is not None and 3 * 4 <= int(missed[1]) < 4 * 4
    assert "x failed: KeyError: 'broken agent'" in str(caught.value)
    assert "x the workflow returned None" in str(caught.value)


def test_on_error_raise_stops_the_batch_with_the_episodes_error(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=4, faults={"on_error": "raise"})
    with pytest.raises(EpisodeError, match="rollout.faults.on_error is raise:\n.*(.|\n)*broken agent"):
        engine.prepare_batch([{"do": "raise"}], OneTurn)


def test_a_batch_counts_as_trained_once_the_next_is_asked_for_also_if_that_one_fails(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), faults={"on_error": "raise", "failed_group_retries": 0})
    source = RolloutDataSource([{"do": "ok"}, {"do": "raise"}])
    engine.prepare_batch(source, OneTurn)
    engine.set_version(1)
    assert source.num_owed >= 1
    with pytest.raises(EpisodeError):
        engine.prepare_batch(source, OneTurn)
    assert source.num_owed == 0


def test_a_source_that_ends_short_of_a_batch_says_so(engine: RemoteInfEngine) -> None:
    with pytest.raises(ConfigError, match="ended with 3 groups left, fewer than consumer_batch_size=4"):
        engine.prepare_batch(iter([{}, {}, {}]), OneTurn)
    with pytest.raises(ConfigError, match="has no rows"):
        engine.prepare_batch([], OneTurn)


def test_the_sources_own_error_reaches_the_caller(engine: RemoteInfEngine) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield {}
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        engine.prepare_batch(broken(), OneTurn)


# -- pause, threads, loops -----------------------------------------------------------------------


def test_pause_starts_nothing_but_delivers_what_finishes(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub()
    stub.call(lambda: setattr(stub.server, "hold", asyncio.Event()))
    engine = start_engine(stub, consumer_batch_size=8)
    engine.submit({}, OneTurn())
    stub.until_held(1)
    engine.pause()
    engine.pause()
    engine.submit({}, OneTurn())
    stub.call(lambda: stub.server.hold.set())  # type: ignore[union-attr]
    assert len(engine.wait(1, timeout=10)) == 1
    with pytest.raises(TimeoutError, match="the engine is paused: call resume"):
        engine.wait(1, timeout=0.1)
    with pytest.raises(ConfigError, match="the engine is paused"):
        engine.rollout_batch([{}], OneTurn)
    with pytest.raises(ConfigError, match="the engine is paused"):
        engine.prepare_batch([{}], OneTurn)
    engine.resume()
    assert len(engine.wait(1, timeout=10)) == 1


def test_the_async_forms_work_from_a_loop_of_the_callers_own(engine: RemoteInfEngine) -> None:
    async def main() -> None:
        await engine.asubmit({}, OneTurn())
        assert (await engine.await_results(1, timeout=10))[0].status == "accepted"
        assert len(await engine.arollout_batch([{}] * 3, OneTurn)) == 3
        assert len(await engine.aprepare_batch([{}], OneTurn)) == 4
        await engine.apause()
        await engine.aresume()
        await engine.aset_version(1)
        assert engine.get_version() == 1
        await engine.aupdate_weights_from_disk("ckpt", 2)
        assert engine.get_version() == 2

    asyncio.run(main())


def test_a_blocking_call_inside_an_episode_is_an_error_not_a_deadlock(engine: RemoteInfEngine) -> None:
    class Block(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
            engine.wait(1)

    (result,) = engine.rollout_batch([{}], Block)
    assert "use its async form" in (result.error or "")


def test_an_engine_that_is_not_running_says_how_to_start_it(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub())
    with pytest.raises(ConfigError, match="initialized already"):
        engine.initialize()
    engine.destroy()
    engine.destroy()
    with pytest.raises(ConfigError, match="the engine is not running"):
        engine.submit({}, OneTurn())


def test_an_error_that_ends_the_engine_ends_each_wait_and_starts_no_group(engine: RemoteInfEngine) -> None:
    engine.fail(StorageError("disk full"))
    engine.submit({}, OneTurn())
    with pytest.raises(StorageError, match="disk full"):
        engine.wait()
    assert engine._executor.gate.paused


def test_an_error_of_the_users_code_is_not_replaced_by_that_of_the_dumps(
    start_stub: StartStub,
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, failure = start_engine(start_stub()), StorageError("disk full")

    def fail() -> None:
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(engine, "destroy", fail)
        with pytest.raises(StorageError):
            engine.__exit__(None, None, None)
        engine.__exit__(StorageError, failure, None)
        assert not caplog.records
        engine.__exit__(KeyError, KeyError(), None)
        assert [record.message for record in caplog.records] == ["disk full"]


def test_no_thread_of_an_engine_outlives_it_or_keeps_the_process_alive(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    before = set(threading.enumerate())
    engine = start_engine(start_stub(), dump_to_file=True)
    own = [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("areal-lite")]
    assert len(own) == 3 and all(thread.daemon for thread in own)
    engine.destroy()
    assert not any(thread.is_alive() for thread in own)


def test_an_engine_that_could_not_start_leaves_no_thread_and_may_start_again(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(start_stub())
    engine.destroy()
    before = set(threading.enumerate())

    def unreachable(config: Any) -> Any:
        raise ServerError("no server answers")

    with monkeypatch.context() as patched:
        patched.setattr(engine_lifecycle, "servers_behind", unreachable)
        with pytest.raises(ServerError, match="no server answers"):
            engine.initialize()
    assert not any(thread.name.startswith("areal-lite") for thread in {*threading.enumerate()} - before)
    engine.initialize()
    assert engine.rollout_batch([{}], OneTurn)[0].status == "accepted"


class WithSession(OneTurn):
    """Needs what the episodes of an engine share."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        await workflow_context.get_aiohttp_session()
        return await super().arun_episode(engine, data)


def test_an_engine_that_starts_again_is_as_new(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), faults={"episode_timeout_s": 20.0})
    for _ in range(2):
        assert [group.status for group in engine.rollout_batch([{}] * 3, WithSession)] == ["accepted"] * 3
        engine.pause()
        engine.destroy()
        engine.initialize()
        assert not engine._client.gate.holders


def test_an_engine_that_starts_again_finds_a_server_that_was_down(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    engine = start_engine(stub, faults={"outage_patience_s": 2.0}, request_retries=1)
    stub.server.refuses.update(["/generate", "/health", "/server_info", "/model_info"])
    with pytest.raises(ServerError, match="no inference server was healthy"):
        engine.rollout_batch([{}], OneTurn)
    engine.destroy()
    stub.server.refuses.clear()
    engine.initialize()
    assert engine.rollout_batch([{}], OneTurn)[0].status == "accepted"


def test_an_engine_that_starts_again_is_not_held_by_an_earlier_full_disk(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub())
    engine._executor.gate.held = True  # as by a dumper that was behind
    engine.destroy()
    engine.initialize()
    assert engine.rollout_batch([{}], OneTurn)[0].status == "accepted"


def test_versions_are_the_servers_and_mix_inside_a_trajectory(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), max_head_offpolicyness=9)
    engine.update_weights_from_disk("ckpt", 4)
    engine.set_version(9)
    (result,) = engine.rollout_batch([{}], TwoTurns)
    assert (result.head_version, result.tail_version, result.start_version) == (4, 4, 9)


# -- waits that nothing can end ------------------------------------------------------------------


def test_a_wait_that_the_staleness_bound_makes_endless_is_an_error(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub())  # the default: on-policy, batches of one group
    engine.submit({}, OneTurn())
    assert len(engine.wait()) == 1
    engine.submit({}, OneTurn())
    with pytest.raises(ConfigError, match=r"wait\(count=1\) would never return: 0 of .* call set_version\(\)"):
        engine.wait()
    with pytest.raises(TimeoutError, match="call set_version"):
        engine.wait(timeout=0.05)
    engine.set_version(1)
    assert len(engine.wait()) == 1  # nothing was lost


def test_a_wait_ends_with_an_error_once_what_runs_has_ended(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2)
    for _ in range(3):
        engine.submit({}, OneTurn())
    with pytest.raises(ConfigError, match=r"would never return: 2 of them ended and none is running"):
        engine.wait(3)
    assert len(engine.wait(2)) == 2


def test_a_wait_ends_with_an_error_once_groups_of_a_data_source_have_taken_all_places(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    hold(stub, lambda ids: ids[0] == 2)
    engine = start_engine(stub, max_head_offpolicyness=1)
    engine.prepare_batch(source_of(2), OneTurn)
    engine.submit({}, OneTurn())
    with ThreadPoolExecutor() as thread:
        waits = thread.submit(engine.wait)
        until(lambda: engine._executor.finished._waiters)
        let_go(stub)
        with pytest.raises(ConfigError, match="would never return: 0 of them ended"):
            waits.result(10)


def test_a_wait_lasts_while_a_rejected_group_may_free_a_place(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub())
    for do in ("reject", "raise", "ok"):
        engine.submit({"do": do}, OneTurn())
    assert sorted(group.status for group in engine.wait(3)) == ["accepted", "failed", "rejected"]


def test_a_wait_without_a_timeout_on_a_paused_engine_is_an_error(engine: RemoteInfEngine) -> None:
    engine.pause()
    engine.submit({}, OneTurn())
    with pytest.raises(ConfigError, match="the engine is paused"):
        engine.wait()


# -- numbers of episodes -------------------------------------------------------------------------


class Records(OneTurn):
    """Records the row's number, and whether the engine keeps the episode."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        workflow_context.record(number=data["number"])
        stats_tracker.get(workflow_context.stat_scope()).scalar(twice=2 * data["number"])
        return await super().arun_episode(engine, data)


def test_numbers_are_means_over_the_accepted_episodes_of_each_scope(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2, group_size=2)
    rows = [{"number": number, "do": do} for number, do in enumerate(("ok", "reject", "raise", "odd", "ok"))]
    engine.rollout_batch(rows, Records)
    mean = (0 + 0 + 3 + 4 + 4) / 5  # of "odd", one episode fails
    assert engine.take_scalars() == {"rollout/number": mean, "rollout/twice": 2 * mean}
    engine.rollout_batch(rows[4:], Records, is_eval=True)
    assert engine.take_scalars() == {}
    assert engine.take_scalars(is_eval=True) == {"eval-rollout/number": 4, "eval-rollout/twice": 8}


def test_numbers_of_a_data_source_come_with_the_batch_of_their_episodes(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2, max_head_offpolicyness=2)
    rows = [{"number": number} for number in range(100)]
    for _ in range(3):
        batch = engine.prepare_batch(rows, Records)
        expected = sum(group.data["number"] for group in batch) / 2
        assert engine.take_scalars()["rollout/number"] == expected
        engine.set_version(engine.get_version() + 1)


def test_a_negative_version_is_refused(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub())
    with pytest.raises(ConfigError, match="the policy version is -1: it starts at 0 and grows"):
        engine.set_version(-1)
    assert engine.get_version() == 0


def test_a_batch_that_waits_for_a_version_says_so_and_comes_with_it(
    start_stub: StartStub, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2, max_head_offpolicyness=1)
    rows = [{}] * 6
    for _ in range(2):
        engine.prepare_batch(rows, OneTurn)
    assert "prepare_batch waits" not in caplog.text
    with ThreadPoolExecutor(1) as thread:
        third = thread.submit(engine.prepare_batch, rows, OneTurn)
        until(lambda: "prepare_batch waits, and nothing runs: 4 groups were started for version 0" in caplog.text)
        assert "call set_version() after a weight update" in caplog.text and not third.done()
        engine.set_version(1)
        assert [group.status for group in third.result(10)] == ["accepted"] * 2
    assert caplog.text.count("prepare_batch waits") == 1
