"""A clock that stands still until a test moves it."""

from __future__ import annotations
import asyncio


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose timers are due when ``now`` says so; sockets and processes work as always."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def turn(self) -> None:
        """Run what is due, and what follows from it."""
        for _ in range(5):
            self.run_until_complete(asyncio.sleep(0))
