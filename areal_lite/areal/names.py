"""AReaL's import paths and names, from areal.toml: an import hook for those that exist, and what replaces the rest.

No file has a path of the table. Importing one gives the module of ours that it stands for, or a namespace whose names
load with their first use. Other modules of AReaL raise an ImportError that says what replaces them.
"""

import functools
import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


@functools.cache
def table() -> dict[str, Any]:
    """Return areal.toml, read on the first import of a name that areal_lite itself does not have."""
    import tomllib

    return tomllib.loads(Path(__file__).with_name("areal.toml").read_text())


def _replacement(kind: str, name: str) -> str | None:
    """Return what replaces one of AReaL's ``names`` or ``modules`` that is not here; None if it has no such."""
    return next((row["hint"] for row in table()["missing"] if name in row.get(kind, ())), None)


class _Namespace(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for module, names in table()["modules"][self.__name__.removeprefix("areal_lite.")].items():
            if name in names:
                return getattr(importlib.import_module(module), name)
        raise missing_name(self.__name__, name)


class _Loader:
    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _Namespace(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        if isinstance(ours := table()["modules"][module.__name__.removeprefix("areal_lite.")], str):
            sys.modules[module.__name__] = importlib.import_module(ours)


def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
    """Return the spec of a module in the table, as an import finder; another one of AReaL's is an ImportError."""
    if not name.startswith("areal_lite."):
        return None
    wanted = name.removeprefix("areal_lite.")
    if (ours := table()["modules"].get(wanted)) is not None:
        return ModuleSpec(name, _Loader, is_package=isinstance(ours, dict))  # type: ignore[arg-type]
    parts = wanted.split(".")
    for end in range(len(parts), 0, -1):
        if hint := _replacement("modules", ".".join(parts[:end])):
            raise ImportError(f"there is no module {name}: {hint}", name=name)
    return None


def missing_name(module: str, name: str) -> Exception:
    """Return the error for a name that ``module`` does not have, with its replacement if AReaL has the name."""
    if hint := _replacement("names", name):
        # An ImportError, because ``from module import name`` hides the text of an AttributeError.
        return ImportError(f"{module} has no {name}: {hint}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")
