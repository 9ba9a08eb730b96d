"""The inference engine that users hold: calls from any thread or event loop run on the engine's own loop."""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import copy
from functools import partial
from inspect import iscoroutinefunction, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_origin
from areal_lite.api import episode_context
from areal_lite.api.engine_api import OLDER_POLICY, Row, ShouldAcceptFn
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.api.image_span import Images
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.api.trajectory import Group, TaskId, TurnRewards
from areal_lite.api.workflow_api import WorkflowLike
from areal_lite.config.dotted_path import load_object
from areal_lite.data.vision.image_encoder import with_spans
from areal_lite.errors import ConfigError
from areal_lite.rollout.engine_lifecycle import EngineLifecycle
from areal_lite.rollout.episodes.group_runner import EpisodeRecipe
from areal_lite.rollout.episodes.grouped_rollout import GroupedRolloutWorkflow
from areal_lite.rollout.episodes.workflow_resolution import pickled_workflow, resolve_workflow
from areal_lite.servers.weights.published_weights import PublishedWeights, WeightFolder

__all__ = ["GroupedRolloutWorkflow", "RemoteInfEngine"]
P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=EngineLifecycle)


def blocking_and_async(
    operation: Callable[Concatenate[E, P], Coroutine[Any, Any, T]],
    async_name: str = "",
    *,
    unclaimed: Callable[[E, T], object] | None = None,
) -> tuple[Callable[Concatenate[E, P], T], Callable[Concatenate[E, P], Coroutine[Any, Any, T]]]:
    """Return the blocking and the async method of an operation, with its signature and documentation. ``unclaimed``
    gets the engine and the result if the caller was cancelled before it arrived.

    An operation that loads a workflow is a function that returns a coroutine: what it does before that, it does in the
    thread that calls it. On the loop, the imports of a workflow would stop all episodes that run."""

    def blocking(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.running_loop.call(operation(self, *args, **kwargs), unclaimed and partial(unclaimed, self))

    async def asynchronous(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.running_loop.acall(operation(self, *args, **kwargs), unclaimed and partial(unclaimed, self))

    name = operation.__name__.removeprefix("_")
    return _named(blocking, name, operation), _named(asynchronous, async_name or f"a{name}", operation)


def also_async(method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], Coroutine[Any, Any, T]]:
    """Return the async form of a method that returns at once."""

    async def asynchronous(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self, *args, **kwargs)

    form: Callable[Concatenate[E, P], Coroutine[Any, Any, T]] = _named(asynchronous, f"a{method.__name__}", method)
    return form


def _named(form: Any, name: str, operation: Callable[..., Any]) -> Any:
    returned: Any = operation.__annotations__["return"]
    if get_origin(returned) is Coroutine:
        returned = get_args(returned)[2]
    form.__name__, form.__qualname__, form.__doc__ = name, f"RemoteInfEngine.{name}", operation.__doc__
    form.__signature__ = signature(operation).replace(return_annotation=returned)
    form.__annotations__ = operation.__annotations__ | {"return": returned}
    form.__wrapped__ = operation  # where tools find the source
    return form


class RemoteInfEngine(EngineLifecycle):
    """Runs episodes against inference servers. A context manager, or ``initialize`` and ``destroy``.

    Every blocking method has an async form for callers inside an event loop: ``asubmit``, ``await_results``,
    ``arollout_batch``, ``aprepare_batch``, ``aclose_source``, ``apause``, ``aresume``, ``aset_version``,
    ``aupdate_weights``, ``aupdate_weights_from_disk``, ``aprobe``. Both run on the engine's loop."""

    turn_discount = 1.0  # of ``rollout.turn_rewards: sum``
    older: "RemoteInfEngine | None" = None
    """Where an older version of the policy answers the calls of the agent ``OLDER_POLICY``."""
    older_share: AbstractAsyncContextManager[Any] = nullcontext()
    """Entered by each of these calls while it runs; a semaphore limits their number."""
    place_metrics: Callable[[], dict[str, float]] = dict  # of the nodes of servers and workers

    def _recipe(
        self,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None,
        should_accept_fn: ShouldAcceptFn | str | None,
        is_eval: bool = False,
    ) -> EpisodeRecipe:
        if isinstance(should_accept_fn, str):
            should_accept_fn = load_object(should_accept_fn, where="should_accept_fn")
        if should_accept_fn is not None and not callable(should_accept_fn) or iscoroutinefunction(should_accept_fn):
            raise ConfigError(
                f"should_accept_fn is {should_accept_fn!r}: give a plain function tensor dict -> bool, or its path"
            )
        what = workflow, workflow_kwargs, self.config
        return EpisodeRecipe(
            workflow=resolve_workflow(*what),
            sent=pickled_workflow(*what) if self.config.workers > 1 else None,
            should_accept_fn=should_accept_fn,
            context=EpisodeContext(is_eval=is_eval, reward_key=self.config.rewards.key),
            turn_rewards=TurnRewards(self.config.turn_rewards, self.turn_discount),
        )

    def _group_size(self, given: int | None) -> int:
        return self.config.group_size if given is None else given

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return one complete answer to ``req``; see ``InferenceEngine.agenerate``."""
        if req.metadata.get("agent") == OLDER_POLICY:
            return await self._ask_older(req)
        if req.image_data:
            req = await with_spans(req, self.config)
        loop, call = self.running_loop, self._client.generate(req)
        return await (call if loop.is_current() else loop.acall(call))

    async def _ask_older(self, req: ModelRequest) -> ModelResponse:
        if self.older is None:
            raise ConfigError(f"agent {OLDER_POLICY} calls an older policy, and older_policy is null: set it")
        context = episode_context.current()
        # the same records, but neither the episode's server nor its oldest version, which are of the policy
        outside = episode_context.enter(context._replace(episode=copy(context.episode)))
        if (episode := episode_context.current().episode) is not None:
            episode.server = None
        try:
            async with self.older_share:
                return await self.older.running_loop.acall(self.older._client.generate(req))
        finally:
            episode_context.leave(outside)
            if episode is not None and context.episode is not None:
                context.episode.num_calls = episode.num_calls  # each call has its own seed

    async def cut_short(self, rid: str) -> bool:
        """End a running call early; see ``InferenceEngine.cut_short``."""
        await self.running_loop.acall(self._client.cut_short(rid))
        return True

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
        recipe = self._recipe(workflow, workflow_kwargs, should_accept_fn, is_eval)
        submission = self._executor.submit(data, recipe, self._group_size(group_size), task_id)
        loop.call_soon(self._executor.enqueue, submission)
        return submission.task_id

    async def _wait(self, count: int = 1, timeout: float | None = None, raise_timeout: bool = True) -> list[Group]:
        """Return ``count`` groups of :meth:`submit`, whatever their status. TimeoutError after ``timeout`` seconds;
        nothing finished is lost. Without it, ConfigError if none runs and the staleness bound lets none start."""
        try:
            return await self._executor.wait(count, timeout)
        except TimeoutError:
            if raise_timeout:
                raise
            return []

    def _rollout_batch(
        self,
        data: Sequence[Row],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
        is_eval: bool = False,
    ) -> Coroutine[Any, Any, list[Group]]:
        """Run all rows now, without the staleness bound; one group per row, in order."""
        recipe = self._recipe(workflow, workflow_kwargs, should_accept_fn, is_eval)
        return self._executor.rollout_batch(list(data), recipe, self._group_size(group_size))

    def _prepare_batch(
        self,
        source: Iterable[Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
    ) -> Coroutine[Any, Any, list[Group]]:
        """Return exactly ``consumer_batch_size`` accepted groups within the staleness bound. They are drawn from
        ``source``, a ``RolloutDataSource`` or any iterable of rows, ahead of need, so generation continues while the
        caller trains. ConfigError if ``group_size`` is given and a ``RolloutDataSource`` has groups of another size."""
        recipe = self._recipe(workflow, workflow_kwargs, should_accept_fn)
        return self._executor.batches.prepare(source, recipe, group_size)

    async def _close_source(self, source: Iterable[Any]) -> None:
        """Stop drawing from ``source``, cancel its groups that are in no batch yet, and give them back to it."""
        await self._executor.batches.close_source(source)

    async def _pause(self) -> None:
        """Start no episode and send no request until :meth:`resume`; finished work is delivered."""
        if not self._executor.gate.paused:
            self._executor.pause()
            self._client.gate.hold("trainer")

    async def _resume(self) -> None:
        """End :meth:`pause`."""
        if self._executor.gate.paused:
            self._client.gate.release("trainer")
            self._executor.resume()

    def get_version(self) -> int:
        """Return the policy version."""
        return self._client.requests.version

    async def _set_version(self, version: int) -> None:
        """Set the policy version and start the episodes it lets start; the trainer is its only writer."""
        if self._workers is not None:  # before the episodes that start now
            self._workers.set_version(version)
        self._executor.set_version(version)
        self._client.requests.version = version

    async def _update_weights(self, weights: PublishedWeights) -> None:
        """Have the servers load ``weights`` and make its version the policy version; if none loaded it, ServerError."""
        await self._client.update_weights(weights)
        await self._set_version(weights.version)

    async def _update_weights_from_disk(self, path: str, version: int) -> None:
        """Have the servers load the checkpoint folder at ``path`` and make ``version`` the policy version."""
        await self._update_weights(WeightFolder(path, version))

    async def _probe(
        self, input_ids: list[int], num_tokens: int, images: Images = ()
    ) -> list[tuple[str, list[int], list[float]]]:
        """Return the greedy answer of each server that is up to one prompt: URL, tokens, log-probs."""
        return await self._client.probe(input_ids, num_tokens, images)

    asubmit = also_async(submit)
    wait, await_results = blocking_and_async(
        _wait, "await_results", unclaimed=lambda self, groups: self._executor.finished.put_back(groups)
    )
    rollout_batch, arollout_batch = blocking_and_async(_rollout_batch)
    prepare_batch, aprepare_batch = blocking_and_async(
        _prepare_batch, unclaimed=lambda self, batch: self._executor.batches.unclaimed(batch)
    )
    close_source, aclose_source = blocking_and_async(_close_source)
    probe, aprobe = blocking_and_async(_probe)
    pause, apause = blocking_and_async(_pause)
    resume, aresume = blocking_and_async(_resume)
    set_version, aset_version = blocking_and_async(_set_version)
    update_weights, aupdate_weights = blocking_and_async(_update_weights)
    update_weights_from_disk, aupdate_weights_from_disk = blocking_and_async(_update_weights_from_disk)
