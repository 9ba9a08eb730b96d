"""A process-wide random state for each episode.

Many environments draw from ``random`` or ``numpy.random``, which the whole process shares, so that one episode's draws
would depend on which others run beside it. Here each has states of its own, which are in place while its code runs and
only then: two interleaved episodes equal the same two one after the other. The states change hands at every ``await``,
because another episode may run there. One lock for the process keeps threads (``rollout.agents.isolation: thread``)
from seeing each other's; code outside of environments that draws in another thread at that moment is not kept away.
"""

import contextlib
import random
import threading
import types
from collections.abc import Coroutine, Generator, Iterator
from typing import Any, TypeVar
import numpy as np

T = TypeVar("T")
_IN_PLACE = threading.RLock()


class OwnRandom:
    """The states of one episode, seeded with ``seed`` (0 to 2**32 - 1)."""

    def __init__(self, seed: int) -> None:
        self._plain: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed).get_state()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Run code that does not await with these states."""
        with _IN_PLACE:
            self._exchange()
            try:
                yield
            finally:
                self._exchange()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine``, with these states in place whenever its code runs."""
        return await self._pieces(coroutine)

    @types.coroutine
    def _pieces(self, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run a coroutine piece by piece, each up to the next wait."""
        resume, value = coroutine.send, None
        while True:
            try:
                with self.in_place():
                    waits_for = resume(value)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                value, resume = (yield waits_for), coroutine.send
            except BaseException as error:  # its cancellation, above all; the coroutine may handle it
                value, resume = error, coroutine.throw

    def _exchange(self) -> None:
        plain, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._plain)
        np.random.set_state(self._numpy)
        self._plain, self._numpy = plain, numpy
