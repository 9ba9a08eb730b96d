"""AReaL's name for loading an object by its dotted path."""

from __future__ import annotations

from typing import Any

from areal_lite.config.dotted_path import load_object


def import_from_string(module_path: str) -> Any:
    """Return the object at ``package.module.Name``.

    Raises:
        ConfigError: If there is none.
    """
    return load_object(module_path, where="module_path")
