"""Load objects by dotted path. Importing runs code, so a config that came with a folder is read under
:func:`importing`, where nothing is loaded."""

import contextlib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from areal_lite.config.dataset_config import ClassConfig
from areal_lite.errors import ConfigError, did_you_mean

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(:[A-Za-z_]\w*)?")
_allowed = ContextVar("areal_lite_importing", default=True)


@contextlib.contextmanager
def importing(*, allowed: bool) -> Iterator[None]:
    """Unless ``allowed``, let every load in this context raise ConfigError. New threads are not in it."""
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def _check_allowed(path: str, where: str) -> None:
    if not _allowed.get():
        raise ConfigError(f"{where} is {path!r}: what a folder's config names is loaded only with --trust-config")


def load_object(path: str, *, where: str) -> Any:
    """Import ``pkg.mod.Name`` (or ``pkg.mod:Name``) and return the object; raises ConfigError."""
    _check_allowed(path, where)
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
    except ImportError as error:
        raise ConfigError(f"{where} is {path!r}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        hint = did_you_mean(name, public, f"; it has {', '.join(sorted(public)) or 'nothing'}")
        raise ConfigError(f"{where} is {path!r}: {module_name} has no {name!r}{hint}") from None


def load_class(config: ClassConfig, base: type, *, where: str) -> type:
    """Import the class that ``config`` names; raises ConfigError. A file is executed once per process. Spawned workers
    do not know its module, so objects of its classes cannot be sent to them; those of an importable module can."""
    _check_allowed(config.path, where)
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
