"""User classes that a config names by file or module, and class name."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

from areal_lite.api.config import ClassConfig
from areal_lite.api.dotted_path import load_object
from areal_lite.errors import ConfigError


def load_class(config: ClassConfig, base: type, *, where: str) -> type:
    """Import the class that ``config`` names.

    A file is executed once per process. Spawned worker processes do not know its module, so objects of its classes
    cannot be sent to them; objects of classes from an importable module can.

    Args:
        config: File or module, and class name.
        base: The required base class.
        where: The config key, for errors.

    Raises:
        ConfigError: If it cannot be loaded, or is not a subclass of ``base``.
    """
    module = _file_module(config.path, where) if config.path.endswith(".py") else config.path
    cls = load_object(f"{module}.{config.name}", where=where)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigError(
            f"{where}: {config.name} of {config.path} is {cls!r}: it must be a subclass of "
            f"{base.__module__}.{base.__qualname__}"
        )
    return cls


def _file_module(path: str, where: str) -> str:
    """Run the file as a module, unless that was done before, and return the module's name."""
    file = Path(path).expanduser().resolve()
    name = f"areal_lite_file_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None or not file.is_file():
            raise ConfigError(f"{where}: no such file {path} (looked in {Path.cwd()})")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return name
