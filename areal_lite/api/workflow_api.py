"""The classes that a user writes: a workflow, or any class with ``async def run()``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from areal_lite.api.engine_api import Agent as Agent
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.engine_api import WorkflowLike as WorkflowLike
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
    ) -> dict[str, torch.Tensor] | dict[str, InteractionWithTokenLogpReward] | None:
        """Run one episode on ``data``, one dataset row.

        Returns:
            A tensor dict (keys and shapes in :mod:`areal_lite.api.tensor_dict`), a dict of
            interactions by completion id, or None to reject the episode.

        An exception is a failure, recorded with its cause; it never becomes a reward of 0.
        """
