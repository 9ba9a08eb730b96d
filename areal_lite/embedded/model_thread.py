"""The thread that owns the model: runs steps of the scheduler, and commands between them.

Guarantees that a command (abort, pause, new weights) never sees a step half done, and that a failed step ends its
requests, not the server. The event loop only calls ``submit``, ``discard`` and ``command``.

All three go through one queue, so they take effect in the order of the calls. Were ``submit`` to append to the
scheduler's queue itself, an abort of all requests could end one that was sent after it.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar
import torch
from areal_lite.embedded.generation_request import GenerationRequest
from areal_lite.embedded.scheduler import Scheduler

T = TypeVar("T")


class ModelThread:
    """Runs a scheduler step by step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the model thread; ``changed`` events are set on ``loop``."""
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        """Stop after the current step and wait for it; live requests get no answer."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout=3.0)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its ``changed`` event signals progress."""
        self._enqueue(lambda: self.scheduler.waiting.append(request))

    def discard(self, request: GenerationRequest) -> None:
        """Abort a request whose client is gone."""
        self._enqueue(lambda: self.scheduler.abort([request]))

    async def command(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the model thread between two steps and return its result, also if the caller leaves."""
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                result = function()
            except Exception as error:  # raised in the caller
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        self._enqueue(run)
        return await asyncio.shield(asyncio.wrap_future(outcome))

    def _enqueue(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    @torch.inference_mode()
    def _run(self) -> None:
        scheduler = self.scheduler
        while True:
            with self._wake:
                while not (self._closing or self._commands or scheduler.can_step):
                    self._wake.wait()
                if self._closing:
                    return
                commands = list(self._commands)
                self._commands.clear()
            try:
                for command in commands:
                    command()
                if scheduler.can_step:
                    scheduler.step()
            except Exception as error:  # one failed batch must not end the server
                scheduler.fail_running(error)
            if scheduler.changed and self._loop is not None:
                changed, scheduler.changed = scheduler.changed, []
                self._loop.call_soon_threadsafe(_set_changed, changed)


def _set_changed(requests: list[GenerationRequest]) -> None:
    for request in requests:
        request.changed.set()
