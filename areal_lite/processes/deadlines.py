"""Many deadlines with one timeout."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Deadlines(Generic[Key]):
    """Calls ``on_expire(key)`` for each key still there ``timeout_s`` seconds after it was added. Lives on the running
    event loop. Keys expire in the order in which they were added, so one timer serves them all."""

    def __init__(self, timeout_s: float, on_expire: Callable[[Key], None]) -> None:
        self._timeout_s = timeout_s
        self._on_expire = on_expire
        self._ends: dict[Key, float] = {}  # on the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: Key) -> None:
        """Start the timeout of ``key``, which must be new."""
        loop = asyncio.get_running_loop()
        end = self._ends[key] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(end, self._expire)

    def discard(self, key: Key) -> None:
        self._ends.pop(key, None)

    def pending(self) -> list[Key]:
        return list(self._ends)

    def close(self) -> None:
        self._ends.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """End the first key if it is due, and come again for the next."""
        self._timer = None
        if not self._ends:
            return
        loop = asyncio.get_running_loop()
        key, end = next(iter(self._ends.items()))
        if is_due := end <= loop.time():
            del self._ends[key]
        if self._ends:
            self._timer = loop.call_at(next(iter(self._ends.values())), self._expire)
        if is_due:
            self._on_expire(key)  # may add keys
