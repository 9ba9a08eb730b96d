"""Many deadlines with one timeout."""

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
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def add(self, key: Key) -> None:
        """Start the timeout of ``key``, which must be new."""
        self._timers[key] = asyncio.get_running_loop().call_later(self._timeout_s, self._expire, key)

    def discard(self, key: Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def pending(self) -> list[Key]:
        return list(self._timers)

    def close(self) -> None:
        for key in self.pending():
            self.discard(key)

    def _expire(self, key: Key) -> None:
        del self._timers[key]
        self._on_expire(key)  # may add keys
