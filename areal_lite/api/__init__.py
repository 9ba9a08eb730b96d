"""Words and contracts: what users write against. Names load with their first use; importing this loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lite.api.config import InferenceEngineConfig, RunConfig
    from areal_lite.api.engine_api import InferenceEngine
    from areal_lite.api.failure import Failure, FailureKind
    from areal_lite.api.generation import GenerationHyperparameters
    from areal_lite.api.interaction import InteractionWithTokenLogpReward
    from areal_lite.api.io_struct import ModelRequest, ModelResponse
    from areal_lite.api.reward_api import AsyncRewardWrapper
    from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence, Trajectory, Turn, TurnRole
    from areal_lite.api.workflow_api import Agent, RolloutWorkflow, WorkflowLike

__all__ = [
    "Agent", "AsyncRewardWrapper", "EpisodeStatus", "Failure", "FailureKind", "GenerationHyperparameters",
    "Group", "InferenceEngine", "InferenceEngineConfig", "InteractionWithTokenLogpReward", "ModelRequest",
    "ModelResponse", "RolloutWorkflow", "RunConfig", "TokenSequence", "Trajectory", "Turn", "TurnRole",
    "WorkflowLike",
]  # fmt: skip

_MODULES = {
    "Agent": "workflow_api",
    "AsyncRewardWrapper": "reward_api",
    "EpisodeStatus": "trajectory",
    "Failure": "failure",
    "FailureKind": "failure",
    "GenerationHyperparameters": "generation",
    "Group": "trajectory",
    "InferenceEngine": "engine_api",
    "InferenceEngineConfig": "config",
    "InteractionWithTokenLogpReward": "interaction",
    "ModelRequest": "io_struct",
    "ModelResponse": "io_struct",
    "RolloutWorkflow": "workflow_api",
    "RunConfig": "config",
    "TokenSequence": "trajectory",
    "Trajectory": "trajectory",
    "Turn": "trajectory",
    "TurnRole": "trajectory",
    "WorkflowLike": "workflow_api",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        from areal_lite.areal_names import missing_name

        raise missing_name(__name__, name)


def __dir__() -> list[str]:
    return __all__
