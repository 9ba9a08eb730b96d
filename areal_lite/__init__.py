"""Agentic RL rollouts on asyncio: an agent, a YAML, exact tokens, a trainer that learns from them.

Importing this package loads neither torch nor transformers, sets no environment variable and
installs no event loop policy.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "workflow_context": "areal_lite.infra.workflow_context",
    "api": "areal_lite.api",
    "train": "areal_lite.notebook",
    "Trainer": "areal_lite.notebook",
}


class _ArealModules:
    """Import finder, asked last: an import of an AReaL module that does not exist here says what replaces it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith("areal_lite."):
            from areal_lite.areal_names import check_module

            check_module(name)


sys.meta_path.append(_ArealModules)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module(_LAZY[name])
        return getattr(module, name) if module.__name__ == "areal_lite.notebook" else module
    from areal_lite.areal_names import missing_name

    raise missing_name(__name__, name)
