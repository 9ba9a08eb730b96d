"""Finished groups and their waiters. Nothing leaves unless a wait succeeds."""

import asyncio
from collections.abc import Callable
from areal_lite.api.trajectory import Group


class FinishedGroups:
    """Groups in the order they finished; lives on the event loop. A waiter's condition is checked once per change."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def put(self, group: Group) -> None:
        self.groups.append(group)
        self.changed()

    def put_back(self, groups: list[Group]) -> None:
        self.groups[:0] = groups
        self.changed()

    def changed(self) -> None:
        for condition, future in self._waiters:
            if not future.done() and condition():
                future.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((condition, future))
            try:
                await future
            finally:
                self._waiters.remove((condition, future))

    def take(self, count: int) -> list[Group]:
        taken = self.groups[:count]
        del self.groups[:count]  # moves pointers; a copy of the rest would touch every group
        return taken
