"""Notices code that blocks the event loop of all episodes, and names it.

A thread asks the loop to answer a few times a second. If it does not answer for a second, the thread logs one warning
for each line of user code that blocks it, and lets the doors of agents refuse calls that wait for themselves
(``SharedResources.while_blocked``): an SDK client that blocks the loop waits for an answer from that very loop.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from contextvars import Context

from areal_lite.api import episode_context
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.api.shared_resources import SharedResources
from areal_lite.api.user_code import place_of
from areal_lite.infra.loop_thread import LoopThread

logger = logging.getLogger(__name__)

BLOCKED_S = 1.0
"""Seconds without an answer after which the loop counts as blocked."""
_BEAT_S = 0.25
_LOOK_S = 0.05


class LoopWatchdog:
    """Watches one event loop from a thread of its own; counts ``blocked_s`` in ``shared``."""

    def __init__(self, loop: LoopThread, shared: SharedResources) -> None:
        self._loop = loop
        self._shared = shared
        self._named: set[str] = set()
        self._stopped = threading.Event()
        shared.counts.setdefault("blocked_s", 0.0)
        self._thread = threading.Thread(target=self._main, name="areal-lite-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
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
                self._look()
                if beat.wait(_LOOK_S):
                    break
            self._shared.counts["blocked_s"] += time.monotonic() - asked

    def _look(self) -> None:
        place = place_of(self._loop.thread)
        if place is None:  # not the user's doing
            return
        name, line = place
        agent = _running_context(self._loop).agent
        fix = "set rollout.agent_isolation: thread" if agent else "move it into asyncio.to_thread"
        message = f"{name} blocks the event loop of all episodes at {line}: await an async call there, or {fix}"
        if line not in self._named:
            self._named.add(line)
            logger.warning("%s", message)
        for refuse in self._shared.while_blocked:
            refuse(agent, message)


def _running_context(loop: LoopThread) -> EpisodeContext:
    """Return the context of the episode whose task a loop runs."""
    task = loop.current_task()
    contexts = [] if task is None else [held for held in gc.get_referents(task) if isinstance(held, Context)]
    return episode_context.of(contexts[0]) if contexts else EpisodeContext()
