"""The inference engine as workflows, trainer and tests see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.api.trajectory import Group, TaskId


class Workflow(Protocol):
    """An object that runs an episode on the engine; users subclass ``RolloutWorkflow``."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode."""


class Agent(Protocol):
    """Any object with this method; no base class is needed."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float] | None:
        """Run one episode and return its reward.

        ``extra_kwargs`` holds ``base_url``, ``api_key`` and ``http_client`` for an OpenAI SDK client.

        Returns:
            A finite number for the whole episode, rewards by completion id, or None to reject.
        """


WorkflowLike = Workflow | type[Any] | Agent | str
"""An instance, a class (with kwargs), an agent object or class, or a dotted path to any of them."""


class FilterDecision(NamedTuple):
    """A filter's decision about a group."""

    keep: bool
    reason: str = ""
    """Why the group is dropped; a short text, by which drops are counted."""


ShouldAcceptFn = Callable[[dict[str, Any]], bool | FilterDecision]
"""A filter gets a group's tensor dict with ``member_idx``, the episode of each sequence, and returns whether to keep
the group, or a decision with its reason."""
Row = Mapping[str, Any]


class InferenceEngine(ABC):
    """Generates answers and runs episodes; implementations own an event loop."""

    @abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return one complete answer to ``req``; aborts and weight updates do not cut it.

        Raises:
            ConfigError: If the request breaks a rule of the server (too long, bad value).
            ServerError: If no server gave a usable answer within the retry budget.
        """

    @abstractmethod
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
        """Queue one row and return its task id at once."""

    @abstractmethod
    def wait(self, count: int = 1, timeout: float | None = None, raise_timeout: bool = True) -> list[Group]:
        """Return ``count`` groups of :meth:`submit`, whatever their status.

        Raises:
            ConfigError: Without ``timeout``, if none of them runs and the staleness bound lets none start.
            TimeoutError: After ``timeout`` seconds; nothing that had finished is lost.
        """

    @abstractmethod
    def rollout_batch(
        self,
        data: Sequence[Row],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
        is_eval: bool = False,
    ) -> list[Group]:
        """Run all rows and return one group per row, in the order of the rows."""

    @abstractmethod
    def prepare_batch(
        self,
        source: Iterable[Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int | None = None,
    ) -> list[Group]:
        """Return exactly ``consumer_batch_size`` accepted groups within the staleness bound.

        Groups are drawn from ``source``, a ``RolloutDataSource`` or any iterable of rows, ahead of need, so
        generation continues while the caller trains. A ``RolloutDataSource`` decides how many episodes a group has.

        Raises:
            ConfigError: If ``group_size`` differs from the size of the source's groups.
        """

    @abstractmethod
    def pause(self) -> None:
        """Start no episode and send no request until :meth:`resume`; finished work is delivered."""

    @abstractmethod
    def resume(self) -> None:
        """End :meth:`pause`."""

    @abstractmethod
    def get_version(self) -> int:
        """Return the policy version."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Set the policy version; the trainer is its only writer."""
