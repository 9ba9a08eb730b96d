"""Words and contracts: what users write against. No torch at import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_lite.api.config import InferenceEngineConfig, RunConfig
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.generation import GenerationHyperparameters
from areal_lite.api.interaction import InteractionWithTokenLogpReward
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.api.reward_api import AsyncRewardWrapper
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence, Trajectory, Turn, TurnRole
from areal_lite.api.workflow_api import Agent, RolloutWorkflow, WorkflowLike

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from areal_lite.areal_names import missing_name

        raise missing_name(__name__, name)


__all__ = [
    "Agent", "AsyncRewardWrapper", "EpisodeStatus", "Failure", "FailureKind", "GenerationHyperparameters",
    "Group", "InferenceEngine", "InferenceEngineConfig", "InteractionWithTokenLogpReward", "ModelRequest",
    "ModelResponse", "RolloutWorkflow", "RunConfig", "TokenSequence", "Trajectory", "Turn", "TurnRole",
    "WorkflowLike",
]  # fmt: skip
