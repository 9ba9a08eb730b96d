"""Functions chosen in the YAML: by name from a table, or by the dotted path of a user's function."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from typing import Any

from areal_lite.config.dotted_path import load_object
from areal_lite.errors import ConfigError


def chosen_function(
    table: Mapping[str, Callable[..., Any]], name: str, options: Mapping[str, Any], *, where: str
) -> Callable[..., Any]:
    """Return the function ``name`` of the table or at that dotted path, with its keyword arguments ``options`` filled
    in. The config keys ``where`` and ``{where}_kwargs`` named them, for errors."""
    function = table.get(name) or _own_function(table, name, where)
    kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
    known = [option for option, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    for option in options:
        if option in known or Parameter.VAR_KEYWORD in kinds.values():
            continue
        if option in kinds:
            raise ConfigError(
                f"{where}_kwargs: argument {option!r} of {name!r} must be keyword-only: write a * before it"
            )
        raise ConfigError(f"{where}_kwargs: {name!r} has no argument {option!r}; it has {', '.join(known) or 'none'}")
    return partial(function, **options)


def _own_function(table: Mapping[str, Any], name: str, where: str) -> Callable[..., Any]:
    if "." in name or ":" in name:
        function: Callable[..., Any] = load_object(name, where=where)
        if not callable(function):
            raise ConfigError(f"{where} is {name!r}, which is {function!r}: it must be a function")
        return function
    close = difflib.get_close_matches(name, table)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"{where} is {name!r}: there is no such function; {hint}choose one of {', '.join(sorted(table))}, or give the "
        "dotted path of your own"
    )
