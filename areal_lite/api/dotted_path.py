"""Objects named in a config by dotted path. Such a name runs code: take it from the config only."""

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
        where: The config key or argument it came from, for the error.

    Raises:
        ConfigError: If the path is malformed, or module or attribute is missing.
    """
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ConfigError(f"{where} is {path!r}: write a dotted path 'package.module.Name'")
    module_name, _, name = path.replace(":", ".").rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{where} is {path!r}: there is no module {error.name!r}. Is the file on the import path? The "
                "commands look in the directory they are started in first"
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
