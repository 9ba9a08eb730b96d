"""Notices code that blocks the event loop of all episodes, and names it.

A thread asks the loop to answer a few times a second. If it does not answer for a second, the thread logs one warning
for each line of user code that blocks it, and lets the doors of agents refuse calls that wait for themselves
(``SharedResources.while_blocked``): an SDK client that blocks the loop waits for an answer from that very loop.

An episode that blocks the loop beyond its deadline gets :class:`DeadlineError` raised in its code. Whose code a
callback is cannot be seen from another thread; it, and what an episode that has ended left behind, may block for as
long as an episode may last. Python cannot interrupt a call into C, such as ``time.sleep``: if one blocks a minute
longer, the process ends with exit code 70.
"""

import asyncio
import ctypes
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from contextvars import Context
from areal_lite.api import episode_context
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.api.shared_resources import SharedResources
from areal_lite.api.trajectory import TaskId
from areal_lite.processes.user_code import place_of
from areal_lite.rollout.loop_thread import LoopThread

logger = logging.getLogger(__name__)
BLOCKED_S = 1.0  # seconds without an answer after which the loop counts as blocked
EXIT_AFTER_S = 60.0  # seconds after the deadline of an episode that cannot be interrupted until the process ends
_BEAT_S = 0.25
_LOOK_S = 0.05
_RAISE_AGAIN_S = 1.0


class DeadlineError(BaseException):
    """Raised in the code of an episode that blocks the event loop beyond its deadline; no ``Exception``, so that user
    code does not catch it by accident. Python makes it there, in the context of that code: in a callback, or a task
    that nobody awaits, asyncio would only log it, so it ends the episode itself."""

    failure_kind = "deadline"

    def __init__(self) -> None:
        super().__init__("the episode blocked the event loop beyond rollout.faults.episode_timeout_s")
        episode = episode_context.current().episode
        if episode is not None and episode.task is not asyncio.current_task():
            asyncio.get_running_loop().call_soon(episode.fail, self)


class LoopWatchdog:
    """Watches one event loop from a thread of its own; counts ``blocked_s`` in ``shared``. ``deadline_of`` returns the
    deadline of a running group on the monotonic clock; ``timeout_s`` is how long an episode may last."""

    def __init__(
        self, loop: LoopThread, shared: SharedResources, deadline_of: Callable[[TaskId], float | None], timeout_s: float
    ) -> None:
        self._loop = loop
        self._deadline_of, self._timeout_s = deadline_of, timeout_s
        self._raised_at = 0.0
        self._shared = shared
        self._named: set[str] = set()
        self._stopped = threading.Event()
        shared.counts.setdefault("blocked_s", 0.0)
        self._thread = threading.Thread(target=self._main, name="areal-lite-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5)

    def _main(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            beat = threading.Event()
            asked = time.monotonic()
            self._loop.call_soon(beat.set)
            if beat.wait(BLOCKED_S):
                continue
            while not self._stopped.is_set():
                self._look(asked)
                if beat.wait(_LOOK_S):
                    break
            self._shared.counts["blocked_s"] += time.monotonic() - asked

    def _look(self, asked: float) -> None:
        self._shared.blocked_at = time.monotonic()
        place = place_of(self._loop.thread)
        if place is None:  # not the user's doing
            return
        name, line = place
        task = self._loop.current_task()
        contexts = [held for held in gc.get_referents(task) if isinstance(held, Context)]
        context = episode_context.of(contexts[0]) if contexts else EpisodeContext()
        agent = context.agent
        fix = "set rollout.agents.isolation: thread" if agent else "move it into asyncio.to_thread"
        message = f"{name} blocks the event loop of all episodes at {line}: await an async call there, or {fix}"
        if line not in self._named:
            self._named.add(line)
            logger.warning("%s", message)
        for refuse in self._shared.while_blocked:
            refuse(agent, message)
        deadline = None if context.task_id is None else self._deadline_of(context.task_id)
        if task is not None and context.task_id is None:
            return
        late_s = time.monotonic() - (deadline or asked + self._timeout_s)
        if late_s > EXIT_AFTER_S:
            logger.error("%s. It cannot be interrupted %.0f s after its deadline: ending the process", message, late_s)
            os._exit(70)
        if late_s > 0 and time.monotonic() - self._raised_at > _RAISE_AGAIN_S:
            self._raised_at = time.monotonic()
            thread = ctypes.c_ulong(self._loop.thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(DeadlineError))
