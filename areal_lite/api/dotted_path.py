"""Load objects by dotted path. Importing runs code, so take paths from trusted configs only."""

from __future__ import annotations

import difflib
import importlib
import re
from typing import Any

from areal_lite.errors import ConfigError

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(:[A-Za-z_]\w*)?")


def load_object(path: str, *, where: str) -> Any:
    """Import ``pkg.mod.Name`` (or ``pkg.mod:Name``) and return the object.

    Args:
        path: The dotted path.
        where: Config key or argument that holds the path, for the error message.

    Raises:
        ConfigError: If the path is malformed, or the module or attribute does not exist.
    """
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ConfigError(f"{where} is {path!r}: write a dotted path 'package.module.Name'")
    module_name, _, name = path.replace(":", ".").rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{where} is {path!r}: there is no module {error.name!r}. Is it on the import path? areal-lite "
                "searches the working directory first"
            ) from error
        raise ConfigError(
            f"{where} is {path!r}: importing {module_name} needs {error.name!r}, which is not installed"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        close = difflib.get_close_matches(name, public, 1)
        hint = (
            f"did you mean {module_name}.{close[0]}?"
            if close
            else f"it has {', '.join(sorted(public)) or 'nothing'}"
        )
        raise ConfigError(f"{where} is {path!r}: {module_name} has no {name!r}; {hint}") from None
