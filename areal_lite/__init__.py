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
    "workflow_context": "areal_lite.rollout.workflow_context",
    "api": "areal_lite.api",
    "train": "areal_lite.tools.notebook",
    "Trainer": "areal_lite.tools.notebook",
}


class _ArealPaths:
    """Import finder, asked last, for the import paths of AReaL (``areal_lite.areal.import_paths``)."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        if name.startswith("areal_lite."):
            from areal_lite.areal.import_paths import find_spec

            return find_spec(name)
        return None


sys.meta_path.append(_ArealPaths)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module(_LAZY[name])
        return getattr(module, name) if module.__name__ == "areal_lite.tools.notebook" else module
    from areal_lite.areal.names import missing_name

    raise missing_name(__name__, name)
