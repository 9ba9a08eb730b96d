"""Finished groups keep the order in which groups finished, and wake each waiter once."""

from __future__ import annotations
import asyncio
import weakref
from typing import Any
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.rollout.episodes.finished_groups import FinishedGroups
from tests.rollout.scripted import on_a_loop


@given(st.lists(st.one_of(st.just("put"), st.just("put back"), st.integers(0, 5))))
def test_groups_leave_in_the_order_they_came_and_those_put_back_come_first(steps: list[str | int]) -> None:
    finished, expected = FinishedGroups(), []
    taken: list[Any] = []
    for number, step in enumerate(steps):
        group: Any = number
        if step == "put":
            finished.put(group)
            expected.append(group)
        elif step == "put back":
            finished.put_back(taken)
            expected, taken = [*taken, *expected], []
        else:
            assert isinstance(step, int)
            taken = finished.take(step)
            assert taken == expected[:step]
            expected = expected[step:]
        assert finished.groups == expected


@on_a_loop
async def test_a_waiter_sleeps_until_its_condition_holds_as_it_runs_and_is_forgotten() -> None:
    finished = FinishedGroups()
    group: Any = object()

    class Condition:
        def __call__(self) -> bool:
            return len(finished.groups) >= 2

    condition = Condition()
    waiter = asyncio.create_task(finished.until(condition))
    left = asyncio.create_task(finished.until(Condition()))
    await asyncio.sleep(0)
    finished.put(group)
    left.cancel()
    await asyncio.sleep(0)
    assert not waiter.done()
    finished.put(group)
    finished.put(group)  # and once more, before the waiter has run
    finished.take(2)  # by another
    await asyncio.sleep(0)
    assert not waiter.done()
    finished.put_back([group])
    await asyncio.sleep(0)
    assert waiter.done()
    forgotten = weakref.ref(condition)
    del condition, waiter
    assert forgotten() is None
