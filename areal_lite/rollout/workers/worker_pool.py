"""Rollout workers: child processes that run the episodes of groups (``rollout.workers``).

The run's process keeps all that must be one: which group starts when, the policy version, data source, retries,
statistics, dumps, and the servers with their state. A worker runs the code of workflows and agents
(``worker_process``); its model calls are made here, in the name of its episodes, so pause, weight
updates, interruption and seeds work as without workers. Guarantees that a worker that dies fails only its own groups
and is started again, and that none outlives :meth:`Workers.close` or this process.
"""

import asyncio
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from areal_lite.api import episode_context
from areal_lite.api.engine_api import InferenceEngine, Row
from areal_lite.api.failure import Failure, FailureKind, attributed_to
from areal_lite.api.shared_resources import SharedResources
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.errors import EpisodeError
from areal_lite.processes.child_process import PickledObject, pickled_object
from areal_lite.processes.place import Places, here
from areal_lite.rollout.workers.worker import CLOSE_S, Worker

logger = logging.getLogger(__name__)

START_TRIES = 3  # times in a row that a worker may die before it is ready


@dataclass(eq=False)
class Workers:
    """The workers of one engine, on its event loop, each at its place ``worker-NUMBER``. ``on_broken`` gets the error
    if a worker cannot be started."""

    engine: InferenceEngine
    config: InferenceEngineConfig
    shared: SharedResources
    on_broken: Callable[[Exception], None]
    places: Places = here

    def __post_init__(self) -> None:
        self._workers: list[Worker] = []  # those that run, ready or not
        self._ready = asyncio.Event()  # set while at least one is ready
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = False

    async def open(self) -> None:
        """Start all workers and wait until they are ready."""
        loop, config = asyncio.get_running_loop(), self.config
        levels = {name: logging.getLogger(name).level for name in ("", "areal_lite")}
        settings = pickled_object((config, levels), name="the rollout section", hint="Or set rollout.workers: 1")
        started = [loop.create_future() for _ in range(config.workers)]
        self._keepers = [loop.create_task(self._keep(n, settings, future)) for n, future in enumerate(started)]
        await asyncio.wait(started)
        for error in [future.exception() for future in started]:
            if error is not None:
                raise error

    async def close(self) -> None:
        self._closing = True
        for worker in self._workers:
            worker.close()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=CLOSE_S)
            for worker in self._workers:
                worker.kill()
            await asyncio.wait(self._keepers)

    def set_version(self, version: int) -> None:
        for worker in self._workers:
            worker.send("version", version)

    async def run(self, workflow: PickledObject | None, data: Row, deadline: float) -> Failure | None:
        """Run the group of the running task in a worker; its episodes get trajectories and records. Return why it
        failed; None if it finished. If cancelled, stop the group and wait until it has cleaned up."""
        with attributed_to(FailureKind.DATA):
            pickled = pickle.dumps(dict(data), pickle.HIGHEST_PROTOCOL)
        while not (ready := [worker for worker in self._workers if worker.is_ready]):
            self._ready.clear()
            await self._ready.wait()
        worker = min(ready, key=lambda worker: len(worker.groups))
        assert workflow is not None
        group = worker.run(workflow, pickled, episode_context.current(), deadline)
        try:
            _, failure = await asyncio.shield(group.end)
        except asyncio.CancelledError:
            worker.send("cancel", group.key)
            was_stopped, failure = await asyncio.shield(group.end)
            if was_stopped:
                raise
        return failure

    async def _keep(self, number: int, settings: PickledObject, started: asyncio.Future[None]) -> None:
        failed_starts, place = 0, self.places(f"worker-{number}")
        while not self._closing:
            worker = Worker(number, self.engine, self.shared, place)
            self._workers.append(worker)
            is_ready = await worker.open(settings)
            if is_ready:
                failed_starts = 0
                self._ready.set()
                if not started.done():
                    started.set_result(None)
            await worker.ended.wait()
            self._workers.remove(worker)
            if self._closing:
                return
            if is_ready:
                logger.warning("%s; starting it again", worker.end)
                continue
            failed_starts += 1
            if failed_starts == START_TRIES:
                error = EpisodeError(
                    f"{worker.end} before it was ready, {START_TRIES} times in a row: its output"
                    f"{place.where or ' above'} says why"
                )
                self.on_broken(error) if started.done() else started.set_exception(error)
                return
