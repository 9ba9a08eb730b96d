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


def _helpers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "areal_lite.areal.helpers")


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
    "utils.dynamic_import": _helpers("import_from_string"),
    "utils.hf_utils": _helpers("apply_chat_template load_hf_tokenizer load_hf_processor_and_tokenizer"),
    "utils.image": _helpers("image2base64"),
    "utils.logging": _helpers("getLogger"),
    "utils.perf_tracer": _helpers(
        "Category trace_perf trace_session session_context trace_scope atrace_scope atrace_session_phase"
    ),
    "utils.stats_tracker": dict.fromkeys(("StatsTracker", "get", "scalar"), "areal_lite.areal.stats_tracker"),
    "reward": dict.fromkeys(("MathVerifyWorker", "get_math_verify_worker"), "areal_lite.areal.math_reward"),
    "reward.gsm8k": {"gsm8k_reward_fn": "areal_lite.areal.math_reward"},
    "dataset": {},
}
"""Module of AReaL, without ``areal.``: the module of ours that it is, or its names and the modules that have them."""


class _Namespace(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        names = PATHS[self.__name__.removeprefix("areal_lite.")]
        if isinstance(names, Mapping) and name in names:
            return getattr(importlib.import_module(names[name]), name)
        raise missing_name(self.__name__, name)


class _Loader:
    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _Namespace(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        target = PATHS[module.__name__.removeprefix("areal_lite.")]
        if isinstance(target, str):
            sys.modules[module.__name__] = importlib.import_module(target)


def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
    """Return the spec of ``areal_lite.PATH`` if the table has PATH; this module is an import finder."""
    if not name.startswith("areal_lite."):
        return None
    module = name.removeprefix("areal_lite.")
    if module in PATHS:
        return ModuleSpec(name, _Loader, is_package=isinstance(PATHS[module], Mapping))  # type: ignore[arg-type]
    check_module(name)
    return None
