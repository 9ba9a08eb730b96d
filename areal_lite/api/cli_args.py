"""Config classes under AReaL's module name, so that its workflow files keep their imports."""

from typing import TYPE_CHECKING

from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.generation import GenerationHyperparameters

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from areal_lite.areal_names import missing_name

        raise missing_name(__name__, name)


__all__ = ["GenerationHyperparameters", "InferenceEngineConfig"]
