"""No group is lost for being slow: cuts take the oldest first and wait for those that no later batch can train."""

from __future__ import annotations
import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence, Trajectory
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.rollout.episodes.admission_gate import AdmissionGate
from areal_lite.rollout.episodes.batch_cut import cut_batch, must_wait
from areal_lite.rollout.episodes.ended_groups import RolloutStatistics, trained_shares
from areal_lite.rollout.episodes.lookahead import Lookahead
from areal_lite.rollout.episodes.row_feed import RowFeed
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.rollout.episodes.test_partial_rollout import hold, let_go, rows_of, source_of
from tests.rollout.scripted import OneTurn, TwoTurns
from tests.stub_server import StubThread

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


def group_of(task_id: int, versions: list[int], **given: Any) -> Group:
    """Return an accepted group with a prompt of one token and a sampled one per version."""
    mask = np.array([False] + [True] * len(versions))
    sequence = TokenSequence(
        input_ids=np.arange(len(mask)), loss_mask=mask, versions=np.array([-1, *versions]), reward=1.0
    )
    trajectory = Trajectory(status=EpisodeStatus.ACCEPTED, sequences=[sequence])
    return Group(
        task_id=task_id,
        group_id=str(task_id),
        status=EpisodeStatus.ACCEPTED,
        data={},
        trajectories=[trajectory],
        **{"run_s": 1.0} | given,
    )


def ids(groups: list[Group]) -> list[int]:
    return [int(group.task_id) for group in groups]


# -- the cut -----------------------------------------------------------------------------------


def test_a_batch_is_cut_oldest_tokens_first_and_then_in_the_order_of_their_start() -> None:
    groups = [
        group_of(1, [5], start_order=9),
        group_of(2, [4], start_order=8),
        group_of(3, [4], start_order=7),
        group_of(4, [6, 3], start_order=99),
    ]
    cut = cut_batch(groups, 3, version=5, max_staleness=2)
    assert (ids(cut.fresh), ids(cut.stale), ids(groups)) == ([4, 3, 2], [], [1])


def test_groups_beyond_the_bound_leave_and_too_few_fresh_ones_stay() -> None:
    groups = [group_of(1, [2, 9]), group_of(2, [3])]
    cut = cut_batch(groups, 2, version=5, max_staleness=2)
    assert (ids(cut.fresh), ids(cut.stale), ids(groups), cut.masked_tokens) == ([], [1], [2], 0)


def test_groups_of_unknown_versions_are_as_old_as_their_start() -> None:
    groups = [group_of(1, [-1], start_version=3), group_of(2, [-1], start_version=2), group_of(3, [4])]
    cut = cut_batch(groups, 2, version=5, max_staleness=2)
    assert (ids(cut.fresh), ids(cut.stale)) == ([1, 3], [2])


def test_masked_tokens_are_counted_and_a_group_without_any_other_is_stale() -> None:
    mixed, old = group_of(1, [1, 2, 2, 3, 4]), group_of(2, [1, 2])
    cut = cut_batch([mixed, old], 1, version=5, max_staleness=2, mask_off_policy=True)
    assert (ids(cut.fresh), ids(cut.stale), cut.masked_tokens) == ([1], [2], 3)
    assert mixed.sequences[0].loss_mask.tolist() == [False, False, False, False, True, True]
    assert (mixed.head_version, mixed.tail_version) == (3, 4)


def test_tokens_of_an_unknown_version_are_not_masked_in_a_group_within_the_bound() -> None:
    group = group_of(1, [-1, 3])
    cut = cut_batch([group], 1, version=5, max_staleness=2, mask_off_policy=True)
    assert (ids(cut.fresh), cut.masked_tokens) == ([1], 0)
    assert group.sequences[0].loss_mask.tolist() == [False, True, True]


@given(
    heads=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=12),
    count=st.integers(1, 5),
    version=st.integers(0, 12),
    bound=st.integers(0, 4),
    mask=st.booleans(),
)
def test_no_trained_token_is_beyond_the_bound_and_no_group_is_lost(
    heads: list[list[int]], count: int, version: int, bound: int, mask: bool
) -> None:
    groups = [group_of(n, versions) for n, versions in enumerate(heads)]
    cut = cut_batch(groups, count, version=version, max_staleness=bound, mask_off_policy=mask)
    assert len(cut.fresh) in (0, count)
    assert sorted(ids([*cut.fresh, *cut.stale, *groups])) == list(range(len(heads)))
    for group in [*cut.fresh, *groups]:
        (sequence,) = group.sequences
        assert sequence.loss_mask.any() and version - sequence.versions[sequence.loss_mask].min() <= bound
    assert len(groups) < count or cut.fresh


# -- waiting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "finished", "waits"),
    [
        ({}, {0: 2}, False),
        ({0: 1}, {2: 2}, True),  # a running group would be too old for the next batch
        ({0: 1}, {0: 1, 2: 5}, True),
        ({0: 1}, {0: 2}, False),  # it has no place in this one either
        ({1: 2}, {2: 2}, False),  # the next batch takes both
        ({1: 3}, {2: 2}, True),  # and not three
        ({1: 3}, {1: 1, 2: 2}, True),
        ({1: 3}, {1: 2}, False),
        ({2: 4}, {3: 2}, False),
        ({2: 5}, {3: 2}, True),
        ({0: 0, 1: 0}, {3: 2}, False),
        ({1: 5}, {0: 2}, False),  # that is full of groups that are older still
    ],
)
def test_a_batch_of_two_waits_for_groups_that_later_batches_have_no_place_for(
    running: dict[int, int], finished: dict[int, int], waits: bool
) -> None:
    assert must_wait(running, finished, 2) is waits


@given(st.dictionaries(st.integers(0, 6), st.integers(0, 9)), st.sets(st.integers(0, 6)), st.integers(1, 4))
def test_a_batch_waits_for_running_groups_alone(finished: dict[int, int], slacks: set[int], count: int) -> None:
    assert not must_wait(dict.fromkeys(slacks, 0), finished, count)


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.integers(0, 6), min_size=200, max_size=200),
)
def test_no_group_grows_too_old_however_long_groups_run(count: int, bound: int, durations: list[int]) -> None:
    """A run in ticks: one group per place starts with each version, and a batch is cut as soon as it may be."""
    lengths = iter(durations)
    running: list[tuple[int, int]] = []  # version at the start, ticks left
    finished: list[int] = []
    for version in range(200 // count - bound):
        starts = count * (bound + 1) if version == 0 else count
        running += [(version, ticks) for ticks in (next(lengths, 0) for _ in range(starts))]
        oldest = version - bound
        while True:
            finished += [start for start, ticks in running if not ticks]
            running = [(start, ticks - 1) for start, ticks in running if ticks]
            slack_running = Counter(max(0, start - oldest) for start, _ in running)
            slack_finished = Counter(max(0, start - oldest) for start in finished)
            if len(finished) >= count and not must_wait(slack_running, slack_finished, count):
                break
        finished.sort()
        assert all(start >= oldest for start in [*finished, *(start for start, _ in running)])
        del finished[:count]


def runs(*task_ids: int) -> dict[Any, Any]:
    """Return running groups of a feed."""
    return dict.fromkeys(task_ids)


def test_a_feed_counts_seconds_only_while_a_full_batch_waits() -> None:
    feed = RowFeed(source_of(1), retries=0)
    ready = feed.ready(1, 10)
    feed.wait_for_oldest({7: 3}, 3)
    assert not ready() and feed.waited_for_oldest_s == 0
    feed.accept(group_of(1, [4]))
    assert not ready()
    feed.running = runs(7)
    feed.ended(group_of(7, [3]))
    assert ready() and feed.waited_for_oldest_s > 0
    before = feed.waited_for_oldest_s
    feed.wait_for_oldest({}, 4)
    assert ready() and feed.waited_for_oldest_s - before < 0.01


def test_a_feed_waits_by_the_groups_that_run_and_have_finished() -> None:
    feed = RowFeed(source_of(1), retries=0)
    feed.running = runs(7, 8, 10, 11, 12)
    ready = feed.ready(2, 10)
    feed.finished.groups += [group_of(1, [6]), group_of(2, [6])]
    feed.wait_for_oldest({7: 1}, 3)  # too old already, and still waited for
    assert not ready()
    feed.ended(group_of(7, [1]))
    assert ready()
    feed.oldest_groups.add_running(8, 3)
    assert not ready()
    feed.accept(group_of(3, [3]))
    assert not ready()
    feed.accept(group_of(4, [3]))  # fills the batch
    assert ready()
    feed.wait_for_oldest({8: 3}, 3)  # counted anew
    assert ready()
    feed.wait_for_oldest({8: 3, 9: 4}, 2)
    assert ready()
    feed.wait_for_oldest({}, 3)
    feed.ended(group_of(8, [3]))  # of the wait before
    feed.oldest_groups.add_running(10, 3)
    feed.finished.groups[:] = [group_of(1, [6]), group_of(2, [6])]
    feed.wait_for_oldest({10: 3}, 3)
    assert not ready()
    feed.wait_for_oldest({10: 3}, None)
    assert ready()
    feed.wait_for_oldest({11: 3, 12: 6}, 3)
    assert not ready()
    feed.ended(group_of(11, [3]))  # the other one has time
    assert ready()


def started_slow(
    start_stub: StartStub, start_engine: StartEngine, workflow: Any = OneTurn, **config: Any
) -> tuple[StubThread, RemoteInfEngine, RolloutDataSource]:
    """Return an engine of bound 1 at version 1 whose row 1 still runs since version 0."""
    stub = start_stub(tell_version=False)  # answers are of the version their request was sent at
    hold(stub, lambda ids: ids[0] == 1)
    engine = start_engine(stub, consumer_batch_size=1, max_head_offpolicyness=1, **config)
    source = source_of(9)
    assert rows_of(engine.prepare_batch(source, workflow)) == [2]
    stub.until_held(1)
    engine.set_version(1)
    return stub, engine, source


def test_a_full_batch_waits_for_the_group_that_the_next_one_could_not_train(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub, engine, source = started_slow(start_stub, start_engine)
    with ThreadPoolExecutor() as thread:
        batch = thread.submit(engine.prepare_batch, source, OneTurn)
        until(engine._executor.batches._asking.locked)
        until_finished(engine, 2)
        assert not batch.done()
        let_go(stub)
        (result,) = batch.result(10)
    assert (result.data["n"], result.head_version) == (1, 0)
    metrics = engine.rollout_metrics()
    assert metrics["discarded_tokens"] == 0 and metrics["waited_for_oldest_s"] > 0
    engine.prepare_batch(source, OneTurn)  # waits for nothing
    assert engine.rollout_metrics()["waited_for_oldest_s"] == metrics["waited_for_oldest_s"]


def until_finished(engine: RemoteInfEngine, count: int) -> None:
    """Return once so many groups of the source have finished."""
    until(lambda: len(engine._executor.ended.statistics._drawn) >= count)
    engine.set_version(engine.get_version())  # and whoever waits for them has run


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_full_batch_waits_for_a_resumed_group_with_tokens_that_the_next_one_could_not_train(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub(tell_version=False)
    engine = start_engine(stub, consumer_batch_size=1, max_head_offpolicyness=1)
    source = source_of(9)
    (group,) = source.get_samples(1)
    group[0].append([1, 1, 1])
    group[0].append([7, 8], sampled=True, logprobs=[-1.0, -2.0], versions=[0, 0], stop_reason="abort")
    source.give_back([group])
    hold(stub, lambda ids: len(ids) > 3)
    engine.set_version(1)
    with ThreadPoolExecutor() as thread:
        batch = thread.submit(engine.prepare_batch, source, OneTurn)
        until(lambda: len(engine._executor.ended.statistics._drawn) >= 1)  # the other group
        let_go(stub)
        (result,) = batch.result(10)
    assert (result.data["n"], result.head_version, result.tail_version) == (1, 0, 1)


def test_a_redrawn_group_is_discarded_and_its_row_comes_again(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub, engine, source = started_slow(start_stub, start_engine, stale_groups="redraw")
    rows = rows_of(engine.prepare_batch(source, OneTurn))
    engine.set_version(2)
    let_go(stub)
    for version in range(3, 6):
        rows += rows_of(engine.prepare_batch(source, OneTurn))
        engine.set_version(version)
    assert rows[0] == 3 and rows.count(1) == 1
    (feed, _) = engine._executor.batches._feeds[id(source)]
    assert engine._executor.gate.taken == 5 + feed.ahead  # the discarded group's place is free
    assert engine.rollout_metrics()["discarded_tokens"] == 8


@pytest.mark.parametrize("end", ["raise", "reject"])
def test_the_failure_or_rejection_of_the_oldest_group_releases_the_batch(
    start_stub: StartStub, start_engine: StartEngine, end: str
) -> None:
    class Ends(OneTurn):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            answer = await super().arun_episode(engine, data)
            if data["n"] != 1:
                return answer
            if end == "raise":
                raise KeyError("after all")
            return None

    stub, engine, source = started_slow(start_stub, start_engine, Ends, faults={"failed_group_retries": 0})
    with ThreadPoolExecutor() as thread:
        batch = thread.submit(engine.prepare_batch, source, Ends)
        until_finished(engine, 2)
        assert not batch.done()
        let_go(stub)
        assert rows_of(batch.result(10)) == [3]
    assert source.dropped.total() == 1


def test_an_oldest_group_that_never_ends_is_waited_for_until_its_deadline(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub, engine, source = started_slow(start_stub, start_engine, faults={"episode_timeout_s": 0.3})
    assert rows_of(engine.prepare_batch(source, OneTurn)) == [3]
    let_go(stub)


def test_a_new_version_while_a_batch_waits_changes_what_it_waits_for(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(tell_version=False), consumer_batch_size=1, max_head_offpolicyness=2)
    gates = {1: asyncio.Event(), 3: asyncio.Event()}
    answered: Counter[int] = Counter()

    class Gated(OneTurn):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            answer = await super().arun_episode(engine, data)
            answered[data["n"]] += 1
            if data["n"] in gates:
                await gates[data["n"]].wait()
            return answer

    source = source_of(9)
    assert rows_of(engine.prepare_batch(source, Gated)) == [2]
    until(lambda: answered[1] == 1)
    engine.set_version(1)
    until(lambda: answered[3] == 1)
    with ThreadPoolExecutor() as thread:
        batch = thread.submit(engine.prepare_batch, source, Gated)
        until(engine._executor.batches._asking.locked)
        engine.set_version(2)  # row 1 is of version 0
        engine.running_loop.call_soon(gates[3].set)
        until_finished(engine, 2)
        assert not batch.done()
        engine.running_loop.call_soon(gates[1].set)
        assert rows_of(batch.result(10)) == [1]


def test_a_new_version_ends_a_wait_for_a_group_that_is_too_old_by_now(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub(tell_version=False)
    hold(stub, lambda ids: ids[0] not in (2, 3))
    engine = start_engine(stub, consumer_batch_size=1, max_head_offpolicyness=1)
    source = source_of(9)
    assert rows_of(engine.prepare_batch(source, OneTurn)) == [2]
    stub.until_held(1)
    engine.set_version(1)
    with ThreadPoolExecutor() as thread:
        batch = thread.submit(engine.prepare_batch, source, OneTurn)
        until_finished(engine, 2)
        until(engine._executor.batches._asking.locked)
        assert not batch.done()
        engine.set_version(2)
        assert rows_of(batch.result(10)) == [3]
    let_go(stub)


def test_a_batch_that_is_asked_for_starts_its_groups_beside_those_ahead(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lookahead, "batch_cut", lambda self, **_: setattr(self, "groups", 6))
    stub = start_stub(tell_version=False)
    hold(stub, lambda ids: ids[0] > 2)
    engine = start_engine(stub, consumer_batch_size=1, max_head_offpolicyness=9)
    source = source_of(20)
    rows = rows_of(engine.prepare_batch(source, OneTurn))
    until(lambda: len(engine._executor.ended.statistics._drawn) == 2)
    assert len(engine._executor.runner.live) == 3  # with one that has finished: the lookahead
    rows += rows_of(engine.prepare_batch(source, OneTurn))
    stub.until_held(6)  # the larger lookahead
    with ThreadPoolExecutor() as thread:
        batch = thread.submit(engine.prepare_batch, source, OneTurn)
        stub.until_held(1)  # one for the batch
        let_go(stub)
        batch.result(10)
    assert sorted(rows) == [1, 2]


# -- admission -----------------------------------------------------------------------------------


def test_groups_start_for_the_batch_that_is_asked_for_and_the_lead_alone_once_it_is_cut() -> None:
    gate = AdmissionGate(max_concurrent=None, max_staleness=2, batch_size=4, extra=1)
    assert [gate.may_start_ahead(8), gate.may_start_ahead(9)] == [True, False]
    gate.cut = True
    assert [gate.may_start_ahead(4), gate.may_start_ahead(5)] == [True, False]
    gate.set_version(1)
    assert gate.may_start_ahead(8)
    gate.lookahead.groups = 7
    assert [gate.may_start_ahead(11), gate.may_start_ahead(12)] == [True, False]
    gate.paused = True
    assert not gate.may_start_ahead(0)


def test_on_policy_nothing_starts_once_the_batch_is_cut_whatever_may_be_in_excess() -> None:
    gate = AdmissionGate(max_concurrent=None, max_staleness=0, batch_size=4, extra=2)
    assert [gate.may_start_ahead(5), gate.may_start_ahead(6)] == [True, False]
    gate.cut = True
    assert not gate.may_start_ahead(0)


# -- what is counted -------------------------------------------------------------------------------


def test_trained_shares_are_a_quarter_each_where_duration_does_not_decide() -> None:
    drawn = [float(n) for n in range(1, 101)]
    assert trained_shares(drawn, drawn) == [0.25] * 4
    assert trained_shares(drawn, drawn[:50]) == [0.5, 0.5, 0.0, 0.0]
    assert trained_shares(drawn, [100.0, 99.0, 1.0, 60.0]) == [0.25, 0.0, 0.25, 0.5]
    assert trained_shares(drawn[:3], drawn) == [] and trained_shares(drawn, []) == []


def test_statistics_count_trained_and_discarded_tokens() -> None:
    statistics = RolloutStatistics()
    assert statistics.metrics()["waited_for_oldest_s"] == 0
    statistics.train([group_of(1, [0, 0]), group_of(2, [1])])
    statistics.train([group_of(3, [1])])
    statistics.discard([], masked_tokens=2)
    statistics.discard([], masked_tokens=3)
    assert (statistics.trained_tokens, statistics.metrics()["discarded_tokens"]) == (4, 5.0)
    for n in range(4):
        statistics.group_ended(group_of(n, [0], run_s=1.0))
    assert [statistics.metrics()[f"trained_share_q{n}"] for n in (1, 2, 3, 4)] == [1.0, 0.0, 0.0, 0.0]


def test_rejected_groups_are_counted_by_reason() -> None:
    statistics = RolloutStatistics()
    for n in range(40):
        group = group_of(n, [0])
        group.end_as(EpisodeStatus.REJECTED, rejection=f"should_accept_fn said no: Reward {n % 2} of all!")
        statistics.group_ended(group)
    statistics.group_ended(group_of(40, [0]))
    statistics.discard([group_of(41, [0])], masked_tokens=0)
    reasons = {name: value for name, value in statistics.metrics().items() if name.startswith("rejected/")}
    said = "rejected/should_accept_fn_said_no_reward"
    assert reasons == {f"{said}_0_of_all": 20.0, f"{said}_1_of_all": 20.0, "rejected/stale": 1.0}
    for n in range(100):
        group = group_of(n, [0])
        group.end_as(EpisodeStatus.REJECTED, rejection=f"reason {n}")
        statistics.group_ended(group)
    assert statistics.metrics()["rejected/other"] == 100 - (32 - 3)


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_slow_rows_train_as_often_as_they_are_drawn_and_nothing_is_discarded(
    start_stub: StartStub, start_engine: StartEngine, bound: int
) -> None:
    engine = start_engine(start_stub(tell_version=False), consumer_batch_size=4, max_head_offpolicyness=bound)

    class Tool(TwoTurns):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            first = await OneTurn().arun_episode(engine, data)
            if data["n"] % 4:
                return first
            await asyncio.sleep(0.03)
            return await super().arun_episode(engine, data)

    source = RolloutDataSource([{"n": n} for n in range(1, 401)])
    trained: list[int] = []
    for version in range(40):
        batch = engine.prepare_batch(source, Tool)
        assert all(version - (group.head_version or 0) <= bound for group in batch)
        trained += rows_of(batch)
        engine.set_version(version + 1)
    assert len(trained) == len(set(trained))
    assert abs(sum(n % 4 == 0 for n in trained) - 40) <= bound + 1
    assert max(trained) <= 160 + 4 * bound
    assert engine.rollout_metrics()["discarded_tokens"] == 0
