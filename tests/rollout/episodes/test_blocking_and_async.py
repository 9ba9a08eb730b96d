"""Blocking and async methods of the engine are one operation: same parameters, result and documentation."""

from __future__ import annotations
import asyncio
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints
import pytest
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.rollout.scripted import OneTurn, until
from tests.stub_server import StubThread

FORMS = {
    "submit": "asubmit",
    "wait": "await_results",
    "rollout_batch": "arollout_batch",
    "prepare_batch": "aprepare_batch",
    "close_source": "aclose_source",
    "pause": "apause",
    "resume": "aresume",
    "set_version": "aset_version",
    "update_weights": "aupdate_weights",
    "update_weights_from_disk": "aupdate_weights_from_disk",
    "probe": "aprobe",
}


@pytest.mark.parametrize(("blocking", "asynchronous"), FORMS.items())
def test_blocking_and_async_have_one_signature_and_documentation(blocking: str, asynchronous: str) -> None:
    sync, async_ = getattr(RemoteInfEngine, blocking), getattr(RemoteInfEngine, asynchronous)
    assert (sync.__name__, async_.__name__) == (blocking, asynchronous)
    assert inspect.iscoroutinefunction(async_) and not inspect.iscoroutinefunction(sync)
    assert inspect.signature(sync) == inspect.signature(async_)
    assert sync.__doc__ == async_.__doc__ and sync.__doc__
    for form in (sync, async_):
        assert "Coroutine" not in str(get_type_hints(form, include_extras=True)["return"]), form


def test_every_operation_has_two_forms_and_the_class_names_the_async_one() -> None:
    forms = {name for name, method in vars(RemoteInfEngine).items() if hasattr(method, "__wrapped__")}
    assert forms == {*FORMS, *FORMS.values()} - {"submit"}
    assert all(f"``{name}``" in (RemoteInfEngine.__doc__ or "") for name in FORMS.values())


def test_blocking_and_async_give_the_same(
    start_stub: Callable[..., StubThread], start_engine: Callable[..., RemoteInfEngine]
) -> None:
    engine = start_engine(start_stub())

    async def main() -> Any:
        await engine.asubmit({"n": 1}, OneTurn)
        submitted = await engine.await_results(1, timeout=10)
        await engine.apause()
        await engine.aresume()
        await engine.aset_version(2)
        return submitted + await engine.arollout_batch([{"n": 2}], OneTurn)

    groups = asyncio.run(main()) + engine.rollout_batch([{"n": 3}], OneTurn)
    assert [(g.data["n"], g.status, g.rewards) for g in groups] == [(n, "accepted", [1.0]) for n in (1, 2, 3)]
    assert engine.get_version() == 2


def test_a_cancelled_batch_starts_no_more_rows_and_stops_those_that_run(
    start_stub: Callable[..., StubThread], start_engine: Callable[..., RemoteInfEngine]
) -> None:
    engine = start_engine(start_stub(), max_concurrent_rollouts=2, consumer_batch_size=8)
    live = engine._executor.runner.live

    async def main() -> None:
        batch = asyncio.create_task(engine.arollout_batch([{"do": "hang"}] * 6, OneTurn))
        await asyncio.to_thread(until, lambda: sum(one.task is not None for one in live.values()) == 2)
        other = asyncio.create_task(engine.arollout_batch([{}], OneTurn))
        await asyncio.to_thread(until, lambda: len(live) == 7)
        batch.cancel()
        await asyncio.wait([batch])
        assert batch.cancelled() and (await other)[0].status == "accepted"

    asyncio.run(main())
    until(lambda: not live)
    stats = engine.export_stats()
    assert (stats["cancelled"], stats["accepted"]) == (6, 1)
