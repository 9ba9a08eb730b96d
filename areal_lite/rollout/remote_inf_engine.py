"""The inference engine that users hold: calls from any thread or event loop run on the engine's own loop."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar

from areal_lite.api.engine_api import InferenceEngine, Row, ShouldAcceptFn
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.api.trajectory import Group, TaskId
from areal_lite.api.workflow_api import WorkflowLike
from areal_lite.config.dotted_path import load_object
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.errors import ConfigError, StorageError
from areal_lite.rollout import garbage_collection as collector_pace
from areal_lite.rollout.dumps.trajectory_dumper import TrajectoryDumper, next_task_id
from areal_lite.rollout.episodes.admission_gate import AdmissionGate
from areal_lite.rollout.episodes.failure_tally import FailureTally
from areal_lite.rollout.episodes.grouped_rollout import GroupedRolloutWorkflow
from areal_lite.rollout.episodes.submission import EpisodeRecipe
from areal_lite.rollout.episodes.workflow_executor import WorkflowExecutor
from areal_lite.rollout.episodes.workflow_resolution import grouped_workflow, pickled_workflow
from areal_lite.rollout.loop_thread import LoopThread
from areal_lite.rollout.loop_watchdog import LoopWatchdog
from areal_lite.rollout.workers.worker_pool import Workers
from areal_lite.servers.client.engine_client import EngineClient
from areal_lite.servers.client.model_identity import ModelIdentity
from areal_lite.servers.pool.server_pool import Server
from areal_lite.servers.pool.sglang_router import servers_behind
from areal_lite.servers.weights.published_weights import PublishedWeights, WeightFolder

__all__ = ["GroupedRolloutWorkflow", "RemoteInfEngine"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Operation(NamedTuple, Generic[T]):
    """Something to run on the engine's loop."""

    coroutine: Coroutine[Any, Any, T]
    unclaimed: Callable[[T], object] | None = None
    """Gets the result if its caller was cancelled before it arrived."""


def both_forms(
    operation: Callable[Concatenate[RemoteInfEngine, P], Operation[T]], async_name: str = ""
) -> tuple[
    Callable[Concatenate[RemoteInfEngine, P], T],
    Callable[Concatenate[RemoteInfEngine, P], Coroutine[Any, Any, T]],
]:
    """Return the blocking and the async method of an operation, with its signature and documentation."""

    def blocking(self: RemoteInfEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._running_loop.call(*operation(self, *args, **kwargs))

    async def asynchronous(self: RemoteInfEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._running_loop.acall(*operation(self, *args, **kwargs))

    returned = str(operation.__annotations__["return"]).removeprefix("Operation[").removesuffix("]")
    signature = inspect.signature(operation).replace(return_annotation=returned)
    name = operation.__name__.removeprefix("_")
    form: Any
    for form, form_name in ((blocking, name), (asynchronous, async_name or f"a{name}")):
        form.__name__, form.__qualname__ = form_name, f"RemoteInfEngine.{form_name}"
        form.__doc__, form.__signature__ = operation.__doc__, signature
        form.__annotations__ = operation.__annotations__ | {"return": returned}
    return blocking, asynchronous


class RemoteInfEngine(InferenceEngine):
    """Runs episodes against inference servers. A context manager, or ``initialize`` and ``destroy``.

    Every blocking method has an async form for callers inside an event loop: ``asubmit``, ``await_results``,
    ``arollout_batch``, ``aprepare_batch``, ``aclose_source``, ``apause``, ``aresume``, ``aset_version``,
    ``aupdate_weights``, ``aupdate_weights_from_disk``, ``aprobe``. Both forms are one operation that runs on the
    engine's loop.
    """

    def __init__(self, config: InferenceEngineConfig, *, model_path: str | None = None) -> None:
        """Start unconnected; servers must serve the model ``model_path`` (folder or hub name), if given."""
        self.config = config
        self._identity = None if model_path is None else ModelIdentity.of(model_path)
        self._client = EngineClient(config, identity=self._identity, on_outage=self.fail)
        self._dumper: TrajectoryDumper | None = None
        self._loop: LoopThread | None = None
        self._watchdog: LoopWatchdog | None = None
        self._workers: Workers | None = None
        self._executor = WorkflowExecutor(
            self,
            config,
            gate=AdmissionGate(
                max_concurrent=config.max_concurrent_rollouts,
                max_staleness=config.max_head_offpolicyness,
                batch_size=config.consumer_batch_size,
                extra=config.extra_groups,
            ),
            on_end=self._on_end,
            interrupt=lambda episodes: self._client.interrupt(episodes),
        )

    def initialize(self) -> Self:
        """Start the event loop and reach the servers.

        Raises:
            ServerError: If no server answers, or a router in ``addresses`` has none.
            ConfigError: If a server speaks another protocol or serves another model, or if dumps are to show text
                and ``tokenizer_path`` holds no tokenizer.
        """
        if self._loop is not None:
            raise ConfigError("the engine is initialized already: call destroy() before a second initialize()")
        if self.config.dump_to_file:
            self._dumper = TrajectoryDumper(self.config, self._on_dumper_change)
            self._executor.number_from(next_task_id(self.config.run_dir))
        self._loop = LoopThread("areal-lite-rollout")
        self._watchdog = LoopWatchdog(self._loop, self._executor.shared, self._executor.deadline_of)
        collector_pace.relax()
        try:
            config = self._loop.call(servers_behind(self.config))
            if config is not self.config:
                self.config = config
                self._client = EngineClient(config, identity=self._identity, on_outage=self.fail)
            self._loop.call(self._client.open())
            if config.workers > 1:
                self._workers = Workers(self, config, self._executor.shared, on_broken=self.fail)
                self._executor.run_in(self._workers)
                self._loop.call(self._workers.open())
        except BaseException:
            self.destroy()
            raise
        return self

    def destroy(self) -> None:
        """End all episodes as cancelled, write the dumps, close the connections, stop the loop.

        Raises:
            StorageError: At the end, if dumps could not be written.
        """
        if self._loop is None:
            return
        self._loop.end_failing()
        self._loop.call(self._executor.close())
        if self._workers is not None:
            self._loop.call(self._workers.close())
            self._workers = None
        self._loop.call(self._client.close())
        if self._watchdog is not None:
            self._watchdog.stop()
        self._loop.stop()
        self._loop = None
        collector_pace.restore()
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
        """The servers with their state."""
        return self._client.pool.servers

    @property
    def _running_loop(self) -> LoopThread:
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

    def _on_dumper_change(self) -> None:
        """Have the loop act on the dumper's state; called by its thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon(self._follow_dumper)

    def _follow_dumper(self) -> None:
        if self._dumper is None:
            return
        if self._dumper.error is not None:
            self.fail(self._dumper.error)
        else:
            self._executor.hold(self._dumper.behind)

    def _recipe(
        self,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None,
        should_accept_fn: ShouldAcceptFn | str | None,
        group_size: int | None,
        is_eval: bool = False,
    ) -> EpisodeRecipe:
        if isinstance(should_accept_fn, str):
            should_accept_fn = load_object(should_accept_fn, where="should_accept_fn")
        if should_accept_fn is not None and not callable(should_accept_fn):
            raise ConfigError(
                f"should_accept_fn is {should_accept_fn!r}: give a function tensor dict -> bool, or its path"
            )
        size = self.config.group_size if group_size is None else group_size
        what = workflow, workflow_kwargs, size, self.config
        return EpisodeRecipe(
            workflow=grouped_workflow(*what),
            sent=pickled_workflow(*what) if self.config.workers > 1 else None,
            should_accept_fn=should_accept_fn,
            group_size=size,
            is_eval=is_eval,
        )

    # -- generation ----------------------------------------------------------------------------

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return one complete answer to ``req``; aborts and weight updates do not cut it."""
        loop = self._running_loop
        if loop.is_current():
            return await self._client.generate(req)
        return await loop.acall(self._client.generate(req))

    # -- episodes ------------------------------------------------------------------------------

    def submit(
        self,
        data: Row,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
        task_id: TaskId | None = None,
        is_eval: bool = False,
    ) -> TaskId:
        """Queue one row and return its task id at once; from any thread, also inside an episode."""
        loop = self._running_loop
        recipe = self._recipe(workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
        submission = self._executor.submit(data, recipe, task_id)
        loop.call_soon(self._executor.enqueue, submission)
        return submission.task_id

    async def asubmit(
        self,
        data: Row,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
        task_id: TaskId | None = None,
        is_eval: bool = False,
    ) -> TaskId:
        """Queue one row and return its task id at once; from any thread, also inside an episode."""
        return self.submit(data, workflow, workflow_kwargs, should_accept_fn, group_size, task_id, is_eval)

    def _wait(self, count: int = 1, timeout: float | None = None, raise_timeout: bool = True) -> Operation[list[Group]]:
        """Return ``count`` groups of :meth:`submit`; see ``InferenceEngine.wait``."""

        async def wait() -> list[Group]:
            try:
                return await self._executor.wait(count, timeout)
            except TimeoutError:
                if raise_timeout:
                    raise
                return []

        return Operation(wait(), self._executor.wait_unclaimed)

    def _rollout_batch(
        self,
        data: Sequence[Row],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
        is_eval: bool = False,
    ) -> Operation[list[Group]]:
        """Run all rows now, without the staleness bound; one group per row, in order."""
        recipe = self._recipe(workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
        return Operation(self._executor.rollout_batch(data, recipe))

    def _prepare_batch(
        self,
        source: Iterable[Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
    ) -> Operation[list[Group]]:
        """Return ``consumer_batch_size`` accepted groups; see ``InferenceEngine.prepare_batch``."""
        recipe = self._recipe(workflow, workflow_kwargs, should_accept_fn, group_size)
        return Operation(self._executor.prepare_batch(source, recipe), partial(self._executor.batch_unclaimed, source))

    def _close_source(self, source: Iterable[Any]) -> Operation[None]:
        """Stop drawing from ``source``, cancel its groups that are in no batch yet, and give them back to it."""
        return Operation(self._executor.close_source(source))

    wait, await_results = both_forms(_wait, "await_results")
    rollout_batch, arollout_batch = both_forms(_rollout_batch)
    prepare_batch, aprepare_batch = both_forms(_prepare_batch)
    close_source, aclose_source = both_forms(_close_source)

    # -- pause, version, weights -----------------------------------------------------------------

    def _pause(self) -> Operation[None]:
        """Start no episode and send no request until :meth:`resume`."""

        async def pause() -> None:
            if not self._executor.gate.paused:
                self._executor.pause()
                self._client.hold()

        return Operation(pause())

    def _resume(self) -> Operation[None]:
        """End :meth:`pause`."""

        async def resume() -> None:
            if self._executor.gate.paused:
                self._client.release()
                self._executor.resume()

        return Operation(resume())

    def get_version(self) -> int:
        """Return the policy version."""
        return self._client.version

    def _set_version(self, version: int) -> Operation[None]:
        """Set the policy version and start the episodes it lets start."""

        async def set_version() -> None:
            if self._workers is not None:  # before the episodes that start now
                self._workers.set_version(version)
            self._executor.set_version(version)
            self._client.version = version

        return Operation(set_version())

    def _update_weights(self, weights: PublishedWeights) -> Operation[None]:
        """Have the servers load ``weights`` and make its version the policy version.

        Raises:
            ServerError: If no server loaded it; the policy version then stays.
        """

        async def update() -> None:
            await self._client.update_weights(weights)
            await self._set_version(weights.version).coroutine

        return Operation(update())

    def _update_weights_from_disk(self, path: str, version: int) -> Operation[None]:
        """Have the servers load the checkpoint folder at ``path`` and make ``version`` the policy version.

        Raises:
            ServerError: If no server loaded it; the policy version then stays.
        """
        return self._update_weights(WeightFolder(path, version))

    def fail(self, error: Exception) -> None:
        """End all calls that wait, and every later one, with ``error``; returns at once, from any thread."""
        with contextlib.suppress(RuntimeError, ConfigError):  # the engine was destroyed meanwhile
            self._running_loop.call_soon(self._executor.pause)
            self._running_loop.fail(error)

    def _probe(self, input_ids: list[int], num_tokens: int) -> Operation[list[tuple[str, list[int], list[float]]]]:
        """Return the greedy answer of each server that is up to one prompt: URL, tokens, log-probs.

        Raises:
            ServerError: If none answers.
        """
        return Operation(self._client.probe(input_ids, num_tokens))

    probe, aprobe = both_forms(_probe)
    pause, apause = both_forms(_pause)
    resume, aresume = both_forms(_resume)
    set_version, aset_version = both_forms(_set_version)
    update_weights, aupdate_weights = both_forms(_update_weights)
    update_weights_from_disk, aupdate_weights_from_disk = both_forms(_update_weights_from_disk)

    def export_stats(self) -> dict[str, int]:
        """Return ended groups by status, and ``abandoned``: episodes that swallowed their cancellation."""
        return {**self._executor.counts, "abandoned": self._executor.abandoned}

    def take_scalars(self, *, is_eval: bool = False) -> dict[str, float]:
        """Return the mean of each number that accepted episodes recorded since the last call, by metric name.

        The episodes of a data source count once :meth:`prepare_batch` returns them.
        """
        return self._executor.scalars.take(is_eval=is_eval)

    def rollout_metrics(self) -> dict[str, float]:
        """Return failures, what pacing cost so far and whether it was fair; see docs/metrics.md, ``rollout/``."""
        lead = float(self._executor.gate.lead.groups)
        return {
            **self._executor.statistics.metrics(),
            **self.failures.metrics(),
            **self._executor.shared.counts,
            "lead_groups": lead,
            "retried_requests": float(self._client.retried),
            "generated_tokens": float(self._client.generated_tokens),
        }

    def server_metrics(self) -> dict[str, float]:
        """Return the figures of each server, by ``INDEX/NAME``; see docs/metrics.md, ``servers/``."""
        return self._client.metrics()

    @property
    def failures(self) -> FailureTally:
        """Failed episodes so far, by cause."""
        return self._executor.failures
