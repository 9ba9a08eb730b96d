"""One source at a time has the places, and no group is lost between sources, callers and hand-outs."""

from __future__ import annotations
import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
import pytest
from aiohttp import web
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.rollout.episodes.test_partial_rollout import hold, let_go, rows_of, source_of
from tests.rollout.scripted import OneTurn, until
from tests.stub_server import StubServer, StubThread

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


def owed_rows(source: object) -> list[int]:
    return sorted(group[0].row["n"] for group in source._owed.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("held", [False, True])
def test_a_source_gets_the_places_of_the_one_asked_before_which_keeps_its_tokens(
    start_stub: StartStub, start_engine: StartEngine, held: bool
) -> None:
    stub = start_stub()
    engine = start_engine(stub, consumer_batch_size=2)
    first, second = source_of(9), source_of(9)
    assert rows_of(engine.prepare_batch(first, OneTurn)) == [1, 2]
    if held:
        hold(stub, lambda ids: ids[0] == 3)
    engine.update_weights_from_disk("ckpt", 1)  # now two groups of the first run ahead
    if held:
        stub.until_held(1)
    assert rows_of(engine.prepare_batch(second, OneTurn)) == [1, 2]
    assert sorted(group[0].row["n"] for group in first.buffer) == [3, 4]
    assert all(len(group[0].tokens) > 3 for group in first.buffer)
    assert owed_rows(first) == [1, 2]  # of its batch
    if held:
        let_go(stub)
    engine.update_weights_from_disk("ckpt", 2)
    assert sorted(rows_of(engine.prepare_batch(first, OneTurn))) == [3, 4]


def test_callers_that_ask_at_once_get_their_batches_in_turn(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2, max_head_offpolicyness=3)
    sources = [source_of(4) for _ in range(3)]

    async def ask() -> list[list[int]]:
        return [rows_of(b) for b in await asyncio.gather(*(engine.aprepare_batch(s, OneTurn) for s in sources))]

    batches = asyncio.run(ask())
    assert [len(set(batch) & {1, 2, 3, 4}) for batch in batches] == [2] * 3  # each of its own source


class Stuck(StubServer):
    """Answers the first abort late."""

    def __init__(self) -> None:
        super().__init__()
        self.aborting = threading.Event()
        self.answer = asyncio.Event()

    async def abort(self, request: web.Request) -> web.Response:
        """Say that it was asked, and wait."""
        self.aborting.set()
        await self.answer.wait()
        return await super().abort(request)


@pytest.mark.parametrize("asks_next", ["the same source", "another"])
def test_a_batch_whose_caller_left_while_it_was_cut_is_for_the_next_caller(
    stack: ExitStack, start_engine: StartEngine, asks_next: str
) -> None:
    server = Stuck()
    stub = stack.enter_context(StubThread(server))
    hold(stub, lambda ids: ids[0] == 1)
    engine = start_engine(stub, consumer_batch_size=1, over_sampling_groups=1)
    source = source_of(4)

    async def ask_and_leave() -> None:
        asked = asyncio.ensure_future(engine.aprepare_batch(source, OneTurn))
        assert await asyncio.to_thread(server.aborting.wait, 10)  # row 2 is the batch, row 1 is being stopped
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        stub.call(server.answer.set)

    asyncio.run(ask_and_leave())
    assert 2 in owed_rows(source)
    next_source = source if asks_next == "the same source" else source_of(4)
    assert rows_of(engine.prepare_batch(next_source, OneTurn)) == [2]
    let_go(stub)
    if asks_next == "another":
        return
    hold(stub, lambda ids: ids[0] == 3)
    engine.update_weights_from_disk("ckpt", 1)
    assert rows_of(engine.prepare_batch(source, OneTurn)) == [1]


def test_the_places_of_a_batch_whose_caller_left_are_for_the_next_source(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2)
    left, other = source_of(6), source_of(4)

    async def ask_and_leave() -> None:
        asked = asyncio.ensure_future(engine.aprepare_batch(left, OneTurn))
        await asyncio.sleep(0)
        until(lambda: engine._executor.gate.cut)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(ask_and_leave())
    assert rows_of(engine.prepare_batch(other, OneTurn)) == [1, 2]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_batch_whose_caller_left_when_it_was_ready_is_for_the_next_caller(
    start_stub: StartStub, start_engine: StartEngine, max_staleness: int
) -> None:
    engine = start_engine(
        start_stub(), consumer_batch_size=2, max_head_offpolicyness=max_staleness, max_concurrent_rollouts=1
    )
    source = source_of(6)

    async def ask_and_leave() -> None:
        asked = asyncio.ensure_future(engine.aprepare_batch(source, OneTurn))
        await asyncio.sleep(0)  # it is asked; from here on this loop is busy, and hears of no answer
        until_accepted(engine, 2)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(ask_and_leave())
    assert {1, 2} <= set(owed_rows(source))
    assert rows_of(engine.prepare_batch(source, OneTurn)) == [1, 2]
    assert engine.export_stats()["accepted"] == 2  # each was counted once
    engine.update_weights_from_disk("ckpt", 1)
    assert rows_of(engine.prepare_batch(source, OneTurn)) == [3, 4]
    assert engine._executor.ended.statistics.trained_tokens == 4 * 8


def test_results_whose_caller_left_when_they_were_ready_are_for_the_next_wait(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2)

    async def wait_and_leave() -> None:
        waits = asyncio.ensure_future(engine.await_results(2))
        await asyncio.sleep(0)
        until_accepted(engine, 2)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    for row in ({"n": 1}, {"n": 2}):
        engine.submit(row, OneTurn)
    asyncio.run(wait_and_leave())
    assert sorted(rows_of(engine.wait(2, timeout=0))) == [1, 2]


def until_accepted(engine: RemoteInfEngine, count: int) -> None:
    """Block until so many groups are accepted, and what waits for them has run."""
    while engine.export_stats().get("accepted", 0) < count:
        os.sched_yield()
    for _ in range(3):
        engine.set_version(engine.get_version())


def test_a_group_given_back_from_a_batch_is_owed_when_it_runs_again(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    engine = start_engine(stub, consumer_batch_size=2, max_head_offpolicyness=1)
    source = source_of(6)
    untrained, trained = engine.prepare_batch(source, OneTurn)
    row = untrained.data["n"]
    hold(stub, lambda ids: ids[0] == row)
    source.mark_trained([trained.samples])
    source.give_back([untrained.samples])
    engine.update_weights_from_disk("ckpt", 1)
    stub.until_held(1)
    batch = engine.prepare_batch(source, OneTurn)  # by which the batch before counts as trained
    assert row not in rows_of(batch)
    assert row in owed_rows(source)


def test_a_loader_of_batches_gives_a_group_for_each_row(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=3)
    batches = [[{"n": 1}, {"n": 2}], [{"n": 3}]]
    assert rows_of(engine.prepare_batch(batches, OneTurn)) == [1, 2, 3]
