"""The inference engine that users hold: calls from any thread or event loop run on the engine's own loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from areal_lite.api.engine_api import Row, ShouldAcceptFn
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.api.trajectory import Group, TaskId
from areal_lite.api.workflow_api import WorkflowLike
from areal_lite.config.dotted_path import load_object
from areal_lite.errors import ConfigError
from areal_lite.rollout.blocking_and_async import Operation, blocking_and_async
from areal_lite.rollout.engine_lifecycle import EngineLifecycle
from areal_lite.rollout.episodes.grouped_rollout import GroupedRolloutWorkflow
from areal_lite.rollout.episodes.submission import EpisodeRecipe
from areal_lite.rollout.episodes.workflow_resolution import grouped_workflow, pickled_workflow
from areal_lite.servers.weights.published_weights import PublishedWeights, WeightFolder

__all__ = ["GroupedRolloutWorkflow", "RemoteInfEngine"]


class RemoteInfEngine(EngineLifecycle):
    """Runs episodes against inference servers. A context manager, or ``initialize`` and ``destroy``.

    Every blocking method has an async form for callers inside an event loop: ``asubmit``, ``await_results``,
    ``arollout_batch``, ``aprepare_batch``, ``aclose_source``, ``apause``, ``aresume``, ``aset_version``,
    ``aupdate_weights``, ``aupdate_weights_from_disk``, ``aprobe``. Both forms are one operation that runs on the
    engine's loop.
    """

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

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return one complete answer to ``req``; aborts and weight updates do not cut it."""
        return await self.running_loop.acall(self._client.generate(req))

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
        loop = self.running_loop
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
        return Operation(
            self._executor.batches.prepare(source, recipe), partial(self._executor.batches.unclaimed, source)
        )

    def _close_source(self, source: Iterable[Any]) -> Operation[None]:
        """Stop drawing from ``source``, cancel its groups that are in no batch yet, and give them back to it."""
        return Operation(self._executor.batches.close_source(source))

    wait, await_results = blocking_and_async(_wait, "await_results")
    rollout_batch, arollout_batch = blocking_and_async(_rollout_batch)
    prepare_batch, aprepare_batch = blocking_and_async(_prepare_batch)
    close_source, aclose_source = blocking_and_async(_close_source)

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
        """Have the servers load ``weights`` and make its version the policy version; if none loaded it, ServerError."""

        async def update() -> None:
            await self._client.update_weights(weights)
            await self._set_version(weights.version).coroutine

        return Operation(update())

    def _update_weights_from_disk(self, path: str, version: int) -> Operation[None]:
        """Have the servers load the checkpoint folder at ``path`` and make ``version`` the policy version."""
        return self._update_weights(WeightFolder(path, version))

    def _probe(self, input_ids: list[int], num_tokens: int) -> Operation[list[tuple[str, list[int], list[float]]]]:
        """Return the greedy answer of each server that is up to one prompt: URL, tokens, log-probs."""
        return Operation(self._client.probe(input_ids, num_tokens))

    probe, aprobe = blocking_and_async(_probe)
    pause, apause = blocking_and_async(_pause)
    resume, aresume = blocking_and_async(_resume)
    set_version, aset_version = blocking_and_async(_set_version)
    update_weights, aupdate_weights = blocking_and_async(_update_weights)
    update_weights_from_disk, aupdate_weights_from_disk = blocking_and_async(_update_weights_from_disk)
