"""AReaL's module name for the config records, so that its workflow files import unchanged."""

from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.generation import GenerationHyperparameters

__all__ = ["GenerationHyperparameters", "InferenceEngineConfig"]
