"""Words and contracts: what users write against, and the records that all rooms pass on.

Promises that importing it loads no torch; its names load with their first use. May import ``config``, ``processes`` and
``errors``; called by every room above and by users' files. Read workflow_api (what users write), engine_api (what an
episode calls), trajectory (what it leaves), turn_tree (how that comes about) and tensor_dict (AReaL's view of it).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lite.api.engine_api import InferenceEngine
    from areal_lite.api.failure import Failure, FailureKind
    from areal_lite.api.interaction import InteractionWithTokenLogpReward
    from areal_lite.api.io_struct import ModelRequest, ModelResponse
    from areal_lite.api.reward_api import AsyncRewardWrapper
    from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence, Trajectory, Turn, TurnRole
    from areal_lite.api.workflow_api import Agent, RolloutWorkflow, WorkflowLike
    from areal_lite.config.generation import GenerationHyperparameters
    from areal_lite.config.rollout_config import InferenceEngineConfig
    from areal_lite.config.run_config import RunConfig

__all__ = [
    "Agent", "AsyncRewardWrapper", "EpisodeStatus", "Failure", "FailureKind", "GenerationHyperparameters",
    "Group", "InferenceEngine", "InferenceEngineConfig", "InteractionWithTokenLogpReward", "ModelRequest",
    "ModelResponse", "RolloutWorkflow", "RunConfig", "TokenSequence", "Trajectory", "Turn", "TurnRole",
    "WorkflowLike",
]  # fmt: skip

_NAMES = {
    "api.engine_api": "InferenceEngine",
    "api.failure": "Failure FailureKind",
    "api.interaction": "InteractionWithTokenLogpReward",
    "api.io_struct": "ModelRequest ModelResponse",
    "api.reward_api": "AsyncRewardWrapper",
    "api.trajectory": "EpisodeStatus Group TokenSequence Trajectory Turn TurnRole",
    "api.workflow_api": "Agent RolloutWorkflow WorkflowLike",
    "config.generation": "GenerationHyperparameters",
    "config.rollout_config": "InferenceEngineConfig",
    "config.run_config": "RunConfig",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return getattr(importlib.import_module(f"areal_lite.{_MODULES[name]}"), name)
        from areal_lite.areal.names import missing_name

        raise missing_name(__name__, name)


def __dir__() -> list[str]:
    return __all__
