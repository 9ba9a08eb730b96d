"""Many deadlines with one timeout and one timer.

All entries have the same timeout, so they expire in the order they were added and only the oldest needs a
timer. Adding and discarding are dict operations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Deadlines(Generic[Key]):
    """Calls ``on_expire(key)`` for each key still there ``timeout_s`` seconds after it was added.

    Lives on the running event loop.
    """

    def __init__(self, timeout_s: float, on_expire: Callable[[Key], None]) -> None:
        self._timeout_s = timeout_s
        self._on_expire = on_expire
        self._due: dict[Key, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: Key) -> None:
        """Start the timeout of ``key``, which must be new."""
        loop = asyncio.get_running_loop()
        due = self._due[key] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(due, self._expire)

    def discard(self, key: Key) -> None:
        self._due.pop(key, None)

    def pending(self) -> list[Key]:
        return list(self._due)

    def close(self) -> None:
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = None
        expired: list[Key] = []
        for key, due in self._due.items():
            if due > now:
                self._timer = loop.call_at(due, self._expire)
                break
            expired.append(key)
        for key in expired:
            del self._due[key]
        for key in expired:  # may add keys
            self._on_expire(key)
