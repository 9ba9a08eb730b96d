"""The classes that a user writes: a workflow, or any class with ``async def run()``."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.interaction import InteractionWithTokenLogpReward

if TYPE_CHECKING:
    import torch


class RolloutWorkflow(ABC):
    """Turns one dataset row into a trajectory."""

    takes_prompt_ids: ClassVar[bool] = False
    """True if it generates from ``raw_prompt_ids`` of its row: the prompt's tokens as the dataset section asks for
    them. Rows of other workflows have none, and a setting that only acts there is an error."""

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> "dict[str, torch.Tensor] | dict[str, InteractionWithTokenLogpReward] | None":
        """Run one episode on ``data``, one dataset row.

        Returns:
            A tensor dict (:mod:`areal_lite.api.tensor_dict`), interactions by completion id, or None to reject it.

        An exception is a failure, recorded with its cause; it never becomes a reward of 0.
        """


class Agent(Protocol):
    """Any object with this method; no base class is needed."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float] | None:
        """Run one episode and return its reward.

        ``extra_kwargs`` holds ``base_url``, ``api_key`` and ``http_client`` for an OpenAI SDK client.

        Returns:
            A finite number for the whole episode, rewards by completion id, or None to reject.
        """


WorkflowLike = RolloutWorkflow | type[Any] | Agent | str
"""An instance, a class (with kwargs), an agent object or class, or a dotted path to any of them."""
