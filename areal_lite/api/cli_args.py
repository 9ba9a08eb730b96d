"""Config classes under AReaL's module name, so that its workflow files keep their imports."""

from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.generation import GenerationHyperparameters

__all__ = ["GenerationHyperparameters", "InferenceEngineConfig"]
