"""Finished groups and their waiters. Nothing leaves unless a wait succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal_lite.api.trajectory import Group


class FinishedGroups:
    """Groups in the order they finished; lives on the event loop.

    A waiter's condition is checked once per change, so a completion costs O(waiters); usually there is
    one.
    """

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def put(self, group: Group) -> None:
        """Add a finished group."""
        self.groups.append(group)
        self.changed()

    def put_back(self, groups: list[Group]) -> None:
        """Return taken groups to the front."""
        self.groups[:0] = groups
        self.changed()

    def changed(self) -> None:
        """Wake the waiters whose condition holds."""
        for condition, future in self._waiters:
            if not future.done() and condition():
                future.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as ``condition()`` holds."""
        while not condition():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((condition, future))
            try:
                await future
            finally:
                self._waiters.remove((condition, future))

    def take(self, count: int) -> list[Group]:
        """Remove and return the ``count`` groups that finished first."""
        taken = self.groups[:count]
        del self.groups[:count]  # moves pointers; a copy of the rest would touch every group
        return taken
