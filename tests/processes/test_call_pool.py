"""Leases of a pool's slots: one holder each, retired at a deadline or when unused, and all ended at the end."""

from __future__ import annotations
import asyncio
import os
import pickle
import time
from typing import Any
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from areal_lite.processes import call_pool
from areal_lite.processes.call_pool import CallPool, Slot
from areal_lite.processes.child_process import ChildProcess, pickled_object
from tests.processes.clock import Clock
from tests.rollout.scripted import on_a_loop

NO_ARGUMENTS = pickle.dumps(((), {}))
SIZE, LEASE_S, IDLE_S = 2, 10, 4


class Leases(RuleBasedStateMachine):
    """Holders that take, return, keep and lose slots, whose processes are real ones that sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(call_pool, "start_python", self.start_process)
        self.loop, self.pool = Clock(), CallPool(SIZE)
        self.errors: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.processes: list[ChildProcess] = []
        self.waiting: list[asyncio.Task[Slot]] = []
        self.held: dict[Slot, float] = {}
        self.lost: list[Slot] = []
        self.unused_since: dict[Slot, float] = {}

    def start_process(self, *_: Any, **__: Any) -> ChildProcess:
        self.processes.append(ChildProcess(["sleep", "1000"], environment=dict(os.environ), output=None))
        return self.processes[-1]

    def turn(self) -> None:
        self.loop.turn()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            slot = task.result()
            self.held[slot] = self.loop.now + LEASE_S
            self.loop.call_later(LEASE_S, self.pool.retire, slot, slot.leases, "over")
            if slot.running is None:
                slot._start()  # as the first call does
        over = [slot for slot, end in self.held.items() if end <= self.loop.now]
        self.lost += over
        for slot in over:
            del self.held[slot]

    @rule()
    def ask(self) -> None:
        self.waiting.append(self.loop.create_task(self.pool.lease()))
        self.turn()

    @rule(data=st.data(), reuse=st.booleans(), next_one_gives_up=st.booleans())
    def release(self, data: st.DataObject, reuse: bool, next_one_gives_up: bool) -> None:
        """Also after the deadline."""
        if self.held or self.lost:
            slot = data.draw(st.sampled_from([*self.held, *self.lost]))
            self.loop.call_later(IDLE_S, self.pool.retire, slot, slot.leases, "idle")
            self.pool.release(slot, reuse=reuse)
            self.unused_since[slot] = self.loop.now
            self.held.pop(slot, None) or self.lost.remove(slot)
        if next_one_gives_up and self.waiting:
            self.waiting.pop(0).cancel()
        self.turn()

    @rule(seconds=st.integers(1, LEASE_S))
    def let_time_pass(self, seconds: int) -> None:
        self.loop.now += seconds
        self.turn()

    @rule(data=st.data())
    def a_process_dies(self, data: st.DataObject) -> None:
        if self.processes:
            process = data.draw(st.sampled_from(self.processes))
            process.kill()
            process.wait()

    @invariant()
    def each_slot_is_idle_or_has_one_holder(self) -> None:
        slots = self.pool._slots
        assert len({*slots}) == SIZE
        assert {*self.held} | {*self.pool._idle} == {*slots} and len(self.held) + len(self.pool._idle) == SIZE
        assert not (self.waiting and self.pool._idle)
        assert not any(slot.end for slot in slots) and all(slot.end for slot in self.lost)

    @invariant()
    def no_process_is_left_without_a_slot_or_unused_for_long(self) -> None:
        slots = [slot for slot in self.pool._slots if slot.running is not None]
        idle = [slot for slot in slots if slot in self.pool._idle]
        assert all(self.loop.now < self.unused_since[slot] + IDLE_S for slot in idle)
        kept = [slot.running[0] for slot in slots]  # type: ignore[index]
        assert all(process.wait(20) is not None for process in self.processes if process not in kept)

    def teardown(self) -> None:
        self.patch.undo()
        for task in self.waiting:
            task.cancel()
        self.loop.turn()
        self.pool.close()
        for slot in (*self.held, *self.lost):
            self.pool.release(slot)
        self.loop.turn()
        self.loop.close()
        assert not self.errors
        assert all(process.wait(20) is not None for process in self.processes)
        assert {*self.pool._idle} == {*self.pool._slots} and len(self.pool._idle) == SIZE


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_leases = Leases.TestCase


@on_a_loop
async def test_the_calls_of_a_lease_share_a_process_and_a_retired_one_says_why() -> None:
    pool, pid = CallPool(1), pickled_object(os.getpid, name="pid", hint="")
    sleep = pickled_object(time.sleep, name="sleep", hint="")
    try:
        first = await pool.lease()
        shared = await first.call(pid, NO_ARGUMENTS)
        assert shared == await first.call(pid, NO_ARGUMENTS) != os.getpid()
        pool.release(first)
        assert await pool.lease() is first
        hanging = asyncio.create_task(first.call(sleep, pickle.dumps(((1000,), {}))))
        await asyncio.sleep(0)
        pool.retire(first, first.leases - 1, "it is not that lease")
        assert not first.end
        pool.retire(first, first.leases, "it was held too long")
        second = await pool.lease()
        other = await second.call(pid, NO_ARGUMENTS)
        assert other != shared
        for call in (hanging, first.call(pid, NO_ARGUMENTS)):
            with pytest.raises(RuntimeError, match=r"worker process died \(it was held too long\)"):
                await call
        pool.release(first)
        assert await second.call(pid, NO_ARGUMENTS) == other
        pool.release(second, reuse=False)
        assert await pool.call(pid, ()) != other
    finally:
        pool.close()


@on_a_loop
async def test_an_unused_process_that_is_retired_leaves_the_warm_ones_first() -> None:
    pool, pid = CallPool(3), pickled_object(os.getpid, name="pid", hint="")
    try:
        slots = [await pool.lease() for _ in range(3)]
        pids = [await slot.call(pid, NO_ARGUMENTS) for slot in slots]
        for slot in slots:
            pool.release(slot)
        pool.retire(slots[1], slots[1].leases, "unused")
        pool.retire(slots[2], slots[2].leases, "unused")
        assert await pool.call(pid, ()) == pids[0]
    finally:
        pool.close()


@on_a_loop
async def test_a_slot_that_is_passed_on_at_once_is_a_new_lease_and_one_that_nobody_took_is_not() -> None:
    pool, pid = CallPool(1), pickled_object(os.getpid, name="pid", hint="")
    try:
        slot = await pool.lease()
        first, used = slot.leases, await slot.call(pid, NO_ARGUMENTS)
        waiting = asyncio.create_task(pool.lease())
        await asyncio.sleep(0)
        pool.release(slot)
        assert await waiting is slot
        pool.retire(slot, first, "the timer of an earlier lease")
        assert await slot.call(pid, NO_ARGUMENTS) == used
        second = slot.leases
        for turns in range(2):  # it gives up before it is granted the slot, and after that
            waiting = asyncio.create_task(pool.lease())
            await asyncio.sleep(0)
            pool.release(slot)
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.sleep(0)
            assert slot in pool._idle and slot.leases == second + turns
            await pool.lease()
        pool.release(slot)
        pool.retire(slot, slot.leases, "it was unused")
        assert await pool.call(pid, ()) != used
    finally:
        pool.close()
