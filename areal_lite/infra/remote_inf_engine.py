"""The inference engine users hold: a thin door from any thread or loop to the one event loop inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.dotted_path import load_object
from areal_lite.api.engine_api import InferenceEngine, Row, ShouldAcceptFn
from areal_lite.api.episode import EpisodeResult, TaskId
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.api.workflow_api import RolloutWorkflow, WorkflowLike
from areal_lite.errors import ConfigError
from areal_lite.infra import collector_pace
from areal_lite.infra.admission_gate import AdmissionGate
from areal_lite.infra.engine_client import EngineClient
from areal_lite.infra.grouped_rollout import GroupedRolloutWorkflow
from areal_lite.infra.loop_thread import LoopThread
from areal_lite.infra.submission import EpisodeRecipe
from areal_lite.infra.trajectory_dumper import TrajectoryDumper
from areal_lite.infra.workflow_executor import WorkflowExecutor
from areal_lite.infra.workflow_resolution import resolve_workflow

__all__ = ["GroupedRolloutWorkflow", "RemoteInfEngine"]


class RemoteInfEngine(InferenceEngine):
    """Runs episodes against inference servers. A context manager, or ``initialize`` and ``destroy``.

    Every blocking method has an async form for callers that have a loop of their own: ``asubmit``,
    ``await_results``, ``arollout_batch``, ``aprepare_batch``, ``apause``, ``aresume``, ``aset_version``,
    ``aupdate_weights_from_disk``.
    """

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.config = config
        self._client = EngineClient(config)
        self._dumper: TrajectoryDumper | None = None
        self._loop: LoopThread | None = None
        self._executor = WorkflowExecutor(
            self,
            config,
            gate=AdmissionGate(
                max_concurrent=config.max_concurrent_rollouts,
                max_staleness=config.max_head_offpolicyness,
                batch_size=config.consumer_batch_size,
                extra=config.over_sampling_groups,
            ),
            on_end=self._on_end,
            interrupt=self._client.interrupt,
        )

    def initialize(self) -> Self:
        """Start the event loop and reach the servers.

        Raises:
            ServerError: If no server answers.
            ConfigError: If dumps are to show text and ``tokenizer_path`` holds no tokenizer.
        """
        if self._loop is not None:
            raise ConfigError(
                "the engine is initialized already: call destroy() before a second initialize()"
            )
        if self.config.dump_to_file:
            self._dumper = TrajectoryDumper(self.config)
        self._loop = LoopThread("areal-lite-rollout")
        collector_pace.relax()
        try:
            self._loop.call(self._client.open())
        except BaseException:
            self.destroy()
            raise
        return self

    def destroy(self) -> None:
        """End all episodes as cancelled, write the dumps, close the connections, stop the loop."""
        if self._loop is None:
            return
        self._loop.call(self._executor.close())
        self._loop.call(self._client.close())
        self._loop.stop()
        self._loop = None
        collector_pace.restore()
        if self._dumper is not None:
            self._dumper.close()
            self._dumper = None

    def __enter__(self) -> Self:
        return self.initialize()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    @property
    def _running_loop(self) -> LoopThread:
        if self._loop is None:
            raise ConfigError(
                "the engine is not running: use `with RemoteInfEngine(config) as engine:` or initialize()"
            )
        return self._loop

    def _on_end(self, result: EpisodeResult) -> None:
        if self._dumper is not None:
            self._dumper.put(result)

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
                f"should_accept_fn is {should_accept_fn!r}: give a function trajectory -> bool, or its path"
            )
        resolved = resolve_workflow(workflow, workflow_kwargs, wrap_agent=self._wrap_agent)
        size = self.config.group_size if group_size is None else group_size
        if size != 1:
            resolved = GroupedRolloutWorkflow(resolved, size, self.config.on_error)
        return EpisodeRecipe(
            workflow=resolved, should_accept_fn=should_accept_fn, group_size=size, is_eval=is_eval
        )

    def _wrap_agent(self, agent: Any) -> RolloutWorkflow:
        wrapper = load_object(self.config.agent_workflow, where="rollout.agent_workflow")
        wrapped = wrapper(agent, self.config)
        assert isinstance(wrapped, RolloutWorkflow)
        return wrapped

    # -- generation ----------------------------------------------------------------------------

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return one answer to ``req``, whole, across aborts and weight updates."""
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

    async def asubmit(self, *args: Any, **kwargs: Any) -> TaskId:
        """:meth:`submit`, which never blocks, for symmetry."""
        return self.submit(*args, **kwargs)

    def wait(
        self, count: int = 1, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[EpisodeResult]:
        """Return ``count`` results of :meth:`submit`; see ``InferenceEngine.wait``."""
        try:
            return self._running_loop.call(
                self._executor.wait(count, timeout), unclaimed=self._executor.wait_unclaimed
            )
        except TimeoutError:
            if raise_timeout:
                raise
            return []

    async def await_results(self, count: int = 1, timeout: float | None = None) -> list[EpisodeResult]:
        """Async form of :meth:`wait`."""
        return await self._running_loop.acall(
            self._executor.wait(count, timeout), unclaimed=self._executor.wait_unclaimed
        )

    def rollout_batch(
        self,
        data: Sequence[Row],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
        is_eval: bool = False,
    ) -> list[EpisodeResult]:
        """Run all rows now, free of the staleness bound; one result per row, in order."""
        recipe = self._recipe(workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
        return self._running_loop.call(self._executor.rollout_batch(data, recipe))

    async def arollout_batch(
        self,
        data: Sequence[Row],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
        is_eval: bool = False,
    ) -> list[EpisodeResult]:
        """Async form of :meth:`rollout_batch`."""
        recipe = self._recipe(workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
        return await self._running_loop.acall(self._executor.rollout_batch(data, recipe))

    def prepare_batch(
        self,
        source: Iterable[Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
    ) -> list[EpisodeResult]:
        """Return ``consumer_batch_size`` accepted results; see ``InferenceEngine.prepare_batch``."""
        recipe = self._recipe(workflow, workflow_kwargs, should_accept_fn, group_size)
        return self._running_loop.call(
            self._executor.prepare_batch(source, recipe),
            unclaimed=partial(self._executor.batch_unclaimed, source),
        )

    async def aprepare_batch(
        self,
        source: Iterable[Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
    ) -> list[EpisodeResult]:
        """Async form of :meth:`prepare_batch`."""
        recipe = self._recipe(workflow, workflow_kwargs, should_accept_fn, group_size)
        return await self._running_loop.acall(
            self._executor.prepare_batch(source, recipe),
            unclaimed=partial(self._executor.batch_unclaimed, source),
        )

    def close_source(self, source: Iterable[Any]) -> None:
        """Draw no more of ``source``; what of it is not in a batch yet ends as cancelled and is given back."""
        self._running_loop.call(self._executor.close_source(source))

    # -- pause, version, weights -----------------------------------------------------------------

    def pause(self) -> None:
        """Start no episode and send no request until :meth:`resume`."""
        self._running_loop.call(self._pause())

    async def apause(self) -> None:
        """Async form of :meth:`pause`."""
        await self._running_loop.acall(self._pause())

    async def _pause(self) -> None:
        if not self._executor.gate.paused:
            self._executor.pause()
            self._client.hold()

    def resume(self) -> None:
        """End :meth:`pause`."""
        self._running_loop.call(self._resume())

    async def aresume(self) -> None:
        """Async form of :meth:`resume`."""
        await self._running_loop.acall(self._resume())

    async def _resume(self) -> None:
        if self._executor.gate.paused:
            self._client.release()
            self._executor.resume()

    def get_version(self) -> int:
        """Return the policy version."""
        return self._client.version

    def set_version(self, version: int) -> None:
        """Set the policy version and start the episodes it lets start."""
        self._running_loop.call(self._set_version(version))

    async def aset_version(self, version: int) -> None:
        """Async form of :meth:`set_version`."""
        await self._running_loop.acall(self._set_version(version))

    async def _set_version(self, version: int) -> None:
        self._executor.set_version(version)
        self._client.version = version

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have the servers load the checkpoint folder at ``path`` and make ``version`` the policy version.

        Raises:
            ServerError: If no server took it; the policy version then stays.
        """
        self._running_loop.call(self._update_weights(path, version))

    async def aupdate_weights_from_disk(self, path: str, version: int) -> None:
        """Async form of :meth:`update_weights_from_disk`."""
        await self._running_loop.acall(self._update_weights(path, version))

    async def _update_weights(self, path: str, version: int) -> None:
        await self._client.update_weights_from_disk(path, version)
        await self._set_version(version)

    def export_stats(self) -> dict[str, int]:
        """Return ended groups by status, and ``abandoned``: episodes that swallowed their cancellation."""
        return {**self._executor.counts, "abandoned": self._executor.abandoned}
