"""The box keeps the order in which groups finished, and wakes each waiter once."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from areal_lite.rollout.episodes.finished_groups import ResultBox
from tests.rollout.scripted import on_a_loop


@given(st.lists(st.one_of(st.just("put"), st.just("put back"), st.integers(0, 5))))
def test_groups_leave_in_the_order_they_came_and_those_put_back_come_first(steps: list[str | int]) -> None:
    box, expected = ResultBox(), []
    taken: list[Any] = []
    for number, step in enumerate(steps):
        group: Any = number
        if step == "put":
            box.put(group)
            expected.append(group)
        elif step == "put back":
            box.put_back(taken)
            expected, taken = [*taken, *expected], []
        else:
            assert isinstance(step, int)
            taken = box.take(step)
            assert taken == expected[:step]
            expected = expected[step:]
        assert box.groups == expected


@on_a_loop
async def test_a_waiter_sleeps_until_its_condition_holds_as_it_runs_and_is_forgotten() -> None:
    box = ResultBox()
    group: Any = object()

    class Condition:
        def __call__(self) -> bool:
            return len(box.groups) >= 2

    condition = Condition()
    waiter = asyncio.create_task(box.until(condition))
    left = asyncio.create_task(box.until(Condition()))
    await asyncio.sleep(0)
    box.put(group)
    left.cancel()
    await asyncio.sleep(0)
    assert not waiter.done()
    box.put(group)
    box.put(group)  # and once more, before the waiter has run
    box.take(2)  # by another
    await asyncio.sleep(0)
    assert not waiter.done()
    box.put_back([group])
    await asyncio.sleep(0)
    assert waiter.done()
    forgotten = weakref.ref(condition)
    del condition, waiter
    assert forgotten() is None
