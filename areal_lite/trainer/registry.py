"""Functions chosen in the YAML: by registered name, or by the dotted path of a user's function."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from typing import Any, Generic, TypeVar

from areal_lite.config.dotted_path import load_object
from areal_lite.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions of one kind by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Return a decorator that registers a function as ``name``."""

        def decorate(function: F) -> F:
            if self._functions.setdefault(name, function) is not function:
                raise ConfigError(f"there is already a {self.kind} {name!r}: choose another name")
            return function

        return decorate

    def names(self) -> list[str]:
        return sorted(self._functions)

    def get(self, name: str, *, where: str) -> F:
        """Return the function registered as ``name`` or at that dotted path; ``where`` is the config key naming it."""
        if name in self._functions:
            return self._functions[name]
        if "." in name or ":" in name:
            function: F = load_object(name, where=where)
            if not callable(function):
                raise ConfigError(f"{where} is {name!r}, which is {function!r}: it must be a function")
            return function
        close = difflib.get_close_matches(name, self._functions)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"{where} is {name!r}: there is no such {self.kind}; {hint}choose one of "
            f"{', '.join(self.names())}, or give the dotted path of your own function"
        )

    def bound(self, name: str, kwargs: Mapping[str, Any], *, where: str) -> Callable[..., Any]:
        """Return :meth:`get` with its keyword arguments filled in from the config key ``{where}_kwargs``."""
        function = self.get(name, where=where)
        kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
        known = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
        for key in kwargs:
            if key in known or Parameter.VAR_KEYWORD in kinds.values():
                continue
            if key in kinds:
                raise ConfigError(
                    f"{where}_kwargs: argument {key!r} of {name!r} must be keyword-only: write a * before it"
                )
            raise ConfigError(
                f"{where}_kwargs: {self.kind} {name!r} has no argument {key!r}; it has {', '.join(known) or 'none'}"
            )
        return partial(function, **kwargs)
