"""``rollout.rewards.key`` for a workflow: which named part of its rewards is the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_lite.api import episode_context
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.failure import FailureKind, attributed_to
from areal_lite.api.scalars import record_counts
from areal_lite.api.tensor_dict import is_interactions
from areal_lite.api.workflow_api import RolloutWorkflow


class KeyedRewards(RolloutWorkflow):
    """Runs ``workflow``, whose reward is the part ``key`` of what its reward function returns, or of ``rewards`` in its
    tensor dict, which may be a dict of ``[B]`` tensors by name. A reward that has no such part is an error."""

    def __init__(self, workflow: RolloutWorkflow, key: str) -> None:
        self.workflow, self.key = workflow, key

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        context = episode_context.current()
        episode_context.enter(context._replace(reward_key=self.key))
        returned = await self.workflow.arun_episode(engine, data)
        parts = None if not returned or is_interactions(returned) else returned.get("rewards")
        with attributed_to(FailureKind.REWARD):
            if isinstance(parts, Mapping) and self.key in parts:
                record_counts({f"reward/{name}": float(part.float().mean()) for name, part in parts.items()})
                return {**returned, "rewards": parts[self.key]}
            episodes = context.episodes or ([] if context.episode is None else [context.episode])
            used = any(f"reward/{self.key}" in episode.counts for episode in episodes)
            if returned is not None and (isinstance(parts, Mapping) or not used):
                raise ValueError(
                    f"rollout.rewards.key is {self.key!r}, and no reward of the episode has that part: return it from "
                    "the reward function or in rewards, a dict of tensors by name; or remove rewards.key"
                )
        return returned
