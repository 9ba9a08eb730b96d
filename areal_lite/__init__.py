"""Agentic RL rollouts on asyncio: an agent, a YAML, exact tokens, a trainer that learns from them.

Importing this package loads neither torch nor transformers, sets no environment variable and
installs no event loop policy.
"""

import importlib
import sys
from typing import TYPE_CHECKING
from areal_lite.areal import names

if TYPE_CHECKING:
    from areal_lite import api
    from areal_lite.rollout import workflow_context
    from areal_lite.tools.export.frames import load_run
    from areal_lite.tools.notebook import Trainer, train

__all__ = ["Trainer", "__version__", "api", "load_run", "train", "workflow_context"]
__version__ = "0.1.0"

_LAZY = {
    "Trainer": "areal_lite.tools.notebook",
    "api": "areal_lite.api",
    "load_run": "areal_lite.tools.export.frames",
    "train": "areal_lite.tools.notebook",
    "workflow_context": "areal_lite.rollout.workflow_context",
}

sys.meta_path.append(names)  # asked last, for the import paths of AReaL

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            module = importlib.import_module(_LAZY[name])
            return getattr(module, name, module)
        raise names.missing_name(__name__, name)


def __dir__() -> list[str]:
    return __all__
