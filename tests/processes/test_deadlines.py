"""Each key expires once, however they come."""

from __future__ import annotations
import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
import pytest
from areal_lite.processes import deadlines as module
from areal_lite.processes.deadlines import Deadlines


def test_keys_expire_in_order_and_later_ones_after_all_have() -> None:
    async def run() -> None:
        expired: asyncio.Queue[str] = asyncio.Queue()
        deadlines = Deadlines(0.01, expired.put_nowait)
        for keys in ("abc", "de"):
            for key in keys:
                deadlines.add(key)
            deadlines.discard("b")
            for key in keys.replace("b", ""):
                assert await asyncio.wait_for(expired.get(), 10) == key
            assert not deadlines.pending()

    asyncio.run(run())


class Timer:
    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due, self.call = due, call
        self.is_set = True

    def cancel(self) -> None:
        self.is_set = False


class Clock:
    """An event loop's clock and timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(due, call))
        return self.timers[-1]

    def set_timers(self) -> list[Timer]:
        self.timers = [timer for timer in self.timers if timer.is_set]
        return self.timers.copy()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while due := [timer for timer in self.set_timers() if timer.due <= self.now]:
            due[0].is_set = False
            due[0].call()


def test_each_key_expires_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a random history."""
    clock, draw = Clock(), random.Random(1)
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    expired: list[int] = []
    due: dict[int, float] = {}
    deadlines: Deadlines[int] = Deadlines(5.0, expired.append)
    for key in range(2000):
        expected: list[int] = []
        match draw.choice(
            ["add", "add", "discard", "advance", "advance", "close" if draw.random() < 0.1 else "advance"]
        ):
            case "add":
                deadlines.add(key)
                due[key] = clock.now + 5.0
            case "discard":
                other = draw.randint(max(0, key - 9), key)
                deadlines.discard(other)
                due.pop(other, None)
            case "advance":
                clock.advance(draw.choice([0.5, 1.0, 2.0]))
                expected = [key for key, at in due.items() if at <= clock.now]
                due = {key: at for key, at in due.items() if at > clock.now}
            case "close":
                deadlines.close()
                due.clear()
                assert not clock.set_timers()
        assert expired == expected
        expired.clear()
        assert deadlines.pending() == list(due)
        timers = clock.set_timers()  # one, whatever was discarded meanwhile, and never too late
        assert len(timers) <= 1
        assert not due or timers[0].due <= min(due.values())
