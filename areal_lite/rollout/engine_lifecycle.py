"""The parts of an inference engine, started and stopped together: loop, client, executor, workers, dumper, watchdog.

Guarantees that :meth:`EngineLifecycle.destroy` ends every episode, whatever has failed, in an order that loses nothing:

1. Calls may no longer fail with the run's error (``end_failing``), or the steps below would, too.
2. The executor ends all groups, and passes each on to the dumper.
3. Workers and client close; until here, an episode that cleans up may still call its model or another process.
4. The watchdog stops before the loop whose tasks it looks at.
5. The dumper closes last, off the loop: it writes what step 2 gave it, and raises if it cannot.

An error that ends the run (too many servers gone, a broken worker, a full disk) comes up in some thread or task with
nobody to raise to. :meth:`EngineLifecycle.fail` passes it to all calls that wait, and to every later one.
"""

import contextlib
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.trajectory import Group
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.errors import ConfigError, StorageError
from areal_lite.processes.place import Places, here
from areal_lite.rollout import garbage_collection
from areal_lite.rollout.dumps.trajectory_dumper import TrajectoryDumper, next_task_id
from areal_lite.rollout.episodes.ended_groups import FailureTally
from areal_lite.rollout.episodes.workflow_executor import WorkflowExecutor
from areal_lite.rollout.loop_thread import LoopThread
from areal_lite.rollout.loop_watchdog import LoopWatchdog
from areal_lite.rollout.workers.worker_pool import Workers
from areal_lite.servers.client.engine_client import EngineClient
from areal_lite.servers.client.model_identity import ModelIdentity
from areal_lite.servers.pool.server_pool import Server
from areal_lite.servers.pool.sglang_router import servers_behind

logger = logging.getLogger(__name__)


class EngineLifecycle(InferenceEngine):
    """Starts and stops the parts; :class:`~areal_lite.rollout.remote_inf_engine.RemoteInfEngine` has the calls."""

    def __init__(self, config: InferenceEngineConfig, *, model_path: str | None = None, places: Places = here) -> None:
        """Start unconnected; servers must serve the model ``model_path`` (folder or hub name), if given. Each rollout
        worker starts at its one of ``places``."""
        self.config = config
        self._places = places
        self._identity = None if model_path is None else ModelIdentity(model_path)
        self._client = EngineClient(config, identity=self._identity, on_outage=self.fail)
        self._dumper: TrajectoryDumper | None = None
        self._loop: LoopThread | None = None
        self._watchdog: LoopWatchdog | None = None
        self._workers: Workers | None = None
        self._executor = WorkflowExecutor(
            self, config, on_end=self._on_end, interrupt=lambda episodes: self._client.interrupt(episodes)
        )

    def initialize(self) -> Self:
        """Start the event loop and reach the servers, which must serve the model in the protocol of the config."""
        if self._loop is not None:
            raise ConfigError("the engine is initialized already: call destroy() before a second initialize()")
        if self.config.dump_to_file:
            self._dumper = TrajectoryDumper(self.config, self._follow_dumper)
            self._executor.runner.number_from(next_task_id(self.config.run_dir))
        self._loop = LoopThread("areal-lite-rollout")
        runner, timeout_s = self._executor.runner, self.config.faults.episode_timeout_s
        self._watchdog = LoopWatchdog(self._loop, runner.shared, runner.deadline_of, timeout_s)
        garbage_collection.relax()
        try:
            config = self._loop.call(servers_behind(self.config))
            if config is not self.config:
                self.config = config
                self._client = EngineClient(config, identity=self._identity, on_outage=self.fail)
            self._loop.call(self._client.open())
            if config.workers > 1:
                shared = self._executor.runner.shared
                self._workers = Workers(self, config, shared, on_broken=self.fail, places=self._places)
                self._executor.runner.workers = self._workers
                self._loop.call(self._workers.open())
        except BaseException:
            self.destroy()
            raise
        return self

    def destroy(self) -> None:
        """End all episodes as cancelled, write dumps, disconnect, stop the loop; StorageError if dumps were lost."""
        if self._loop is None:
            return
        self._loop.end_failing()
        self._loop.call(self._executor.close())
        if self._workers is not None:
            self._loop.call(self._workers.close())
        self._loop.call(self._client.close())
        if self._watchdog is not None:
            self._watchdog.stop()
        self._loop.stop()
        self._loop = None
        garbage_collection.restore()
        if self._dumper is not None:
            dumper, self._dumper = self._dumper, None
            dumper.close()

    def __enter__(self) -> Self:
        return self.initialize()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.destroy()
        except StorageError as failure:
            if error is None:
                raise
            if failure is not error:
                logger.warning("%s", failure)

    @property
    def servers(self) -> Sequence[Server]:
        return self._client.pool.servers

    @property
    def addresses(self) -> list[str]:
        """HOST:PORT of the servers, for workflows of AReaL's that call them past the engine."""
        return [server.url.partition("://")[2] for server in self.servers]

    @property
    def running_loop(self) -> LoopThread:
        """The loop that all calls run on; a ConfigError if the engine is not initialized."""
        if self._loop is None:
            raise ConfigError(
                "the engine is not running: use `with RemoteInfEngine(config) as engine:` or initialize()"
            )
        return self._loop

    def _on_end(self, group: Group) -> None:
        if self._dumper is not None:
            self._dumper.put(group)
            self._executor.gate.held = self._dumper.behind

    def flush_dumps(self) -> None:
        """Wait until the groups that have ended are dumped; a disk that hangs is waited for 10 s."""
        if self._dumper is not None:
            self._dumper.flush()

    def _follow_dumper(self) -> None:
        """Have the loop act on the dumper's state; called by its thread."""
        if (dumper := self._dumper) is None:
            return
        if dumper.error is not None:
            self.fail(dumper.error)
            return
        with contextlib.suppress(RuntimeError, ConfigError):  # the engine was destroyed meanwhile
            self.running_loop.call_soon(lambda: self._executor.hold(dumper.behind))  # as it is then

    def fail(self, error: Exception) -> None:
        """End all calls that wait, and every later one, with ``error``; returns at once, from any thread."""
        with contextlib.suppress(RuntimeError, ConfigError):  # the engine was destroyed meanwhile
            self.running_loop.call_soon(self._executor.pause)
            self.running_loop.fail(error)

    def move_server(self, former: str, address: str) -> None:
        """Reach the server that was at ``former`` at ``address``, from any thread; it gets the newest weights first."""
        with contextlib.suppress(RuntimeError, ConfigError):  # the engine was destroyed meanwhile
            self.running_loop.call_soon(self._client.move_server, former, address)

    def export_stats(self) -> dict[str, int]:
        """Return ended groups by status, and ``abandoned``: episodes that swallowed their cancellation."""
        return {**self._executor.ended.counts, "abandoned": self._executor.runner.abandoned}

    def take_scalars(self, *, is_eval: bool = False) -> dict[str, float]:
        """Return the mean of each number that accepted episodes recorded since the last call, by metric name. The
        episodes of a data source count once :meth:`prepare_batch` returns them."""
        return self._executor.ended.scalars.take(is_eval=is_eval)

    def rollout_metrics(self) -> dict[str, float]:
        """Return failures, what pacing cost so far and whether it was fair; see docs/metrics.md, ``rollout/``."""
        return {
            **self._executor.ended.statistics.metrics(),
            **self.failures.metrics(),
            **self._executor.runner.shared.counts,
            "lead_groups": float(self._executor.gate.lookahead.groups),
            **self._client.counts(),
        }

    def forecast_lead(self, batches: int) -> float:
        """Return the mean number of groups that may start ahead of each of the next ``batches``, at least one."""
        return self._executor.gate.lookahead.forecast(batches)

    def server_metrics(self) -> dict[str, float]:
        """Return the figures of each server, by ``INDEX/NAME``; see docs/metrics.md, ``servers/``."""
        return self._client.metrics()

    @property
    def failures(self) -> FailureTally:
        return self._executor.ended.failures
