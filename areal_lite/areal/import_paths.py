"""AReaL's import paths: one table, and the import hook that serves it.

No file has a path of the table. Importing one gives the module of ours that it stands for, or a namespace whose names
load with their first use. Other modules of AReaL raise an ImportError that says what replaces them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from areal_lite.areal.names import check_module, missing_name

_OPENAI = {
    "ArealOpenAI": "areal_lite.agents.areal_openai",
    "InteractionWithTokenLogpReward": "areal_lite.api.interaction",
}

PATHS: Mapping[str, str | Mapping[str, str]] = {
    "infra": {},
    "infra.workflow_context": "areal_lite.rollout.workflow_context",
    "infra.remote_inf_engine": "areal_lite.rollout.remote_inf_engine",
    "api.cli_args": {
        "GenerationHyperparameters": "areal_lite.config.generation",
        "InferenceEngineConfig": "areal_lite.config.rollout_config",
    },
    "experimental": {},
    "experimental.openai": _OPENAI,
    "experimental.openai.types": _OPENAI,
    "utils": {},
    "utils.data": {"concat_padded_tensors": "areal_lite.api.tensor_dict"},
    "utils.dynamic_import": "areal_lite.areal.dynamic_import",
    "utils.hf_utils": "areal_lite.areal.hf_utils",
    "utils.logging": "areal_lite.areal.logging",
    "utils.perf_tracer": "areal_lite.areal.perf_tracer",
    "utils.stats_tracker": "areal_lite.areal.stats_tracker",
    "reward": dict.fromkeys(("MathVerifyWorker", "get_math_verify_worker"), "areal_lite.areal.math_reward"),
    "reward.gsm8k": "areal_lite.areal.gsm8k",
    "dataset": {},
}
"""Module of AReaL, without ``areal.``: the module of ours that it is, or its names and the modules that have them."""


class _Namespace(ModuleType):
    """A module of AReaL that has only names of other modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        names = PATHS[self.__name__.removeprefix("areal_lite.")]
        if isinstance(names, Mapping) and name in names:
            return getattr(importlib.import_module(names[name]), name)
        raise missing_name(self.__name__, name)


class _Loader:
    """Puts a module of ours, or a namespace, in the place of a module of AReaL."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _Namespace(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        target = PATHS[module.__name__.removeprefix("areal_lite.")]
        if isinstance(target, str):
            sys.modules[module.__name__] = importlib.import_module(target)


def find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of ``areal_lite.PATH`` if the table has PATH.

    Raises:
        ImportError: If only AReaL has the module; says what replaces it.
    """
    path = name.removeprefix("areal_lite.")
    if path in PATHS:
        return ModuleSpec(name, _Loader, is_package=isinstance(PATHS[path], Mapping))  # type: ignore[arg-type]
    check_module(name)
    return None
