"""Every config key with type, default and meaning, read from the config classes."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from areal_lite.config.rollout_config import RunIdentity
from areal_lite.config.schema import meaning_of, section_of

_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null", Any: "anything"}
_BOUNDS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}


class FieldHelp(NamedTuple):
    """One YAML key."""

    key: str
    """Dotted path, as in an override."""
    type: str
    """In words; ``section`` for a nested config class."""
    default: str | None
    """Default as YAML, or None if a value is required."""
    meaning: str
    """Docstring of the field."""


def describe_fields(root: type[Any], prefix: str = "") -> Iterator[FieldHelp]:
    """Yield the fields of a config class, and the fields of each section after it.

    A section's copies of the run's :class:`RunIdentity` are left out.
    """
    hints = typing.get_type_hints(root, include_extras=True)
    for field in dataclasses.fields(root):
        if prefix and issubclass(root, RunIdentity) and field.name in RunIdentity.__dataclass_fields__:
            continue
        info: FieldInfo = root.__pydantic_fields__[field.name]
        key = prefix + field.name
        section = section_of(hints[field.name])
        meaning = meaning_of(root, field.name)
        if section is None:
            default = None if info.is_required() else _yaml_word(info.get_default(call_default_factory=True))
            yield FieldHelp(key, _type_words(hints[field.name]), default, meaning)
        else:
            default = None if info.is_required() else "null" if info.default is None else "{}"
            yield FieldHelp(key, "section", default, meaning)
            yield from describe_fields(section, f"{key}.")


def _type_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        constraints = [c for extra in arguments[1:] for c in getattr(extra, "metadata", [extra])]
        limits = [f"{_BOUNDS[type(c)]} {dataclasses.astuple(c)[0]}" for c in constraints if type(c) in _BOUNDS]
        return " ".join([_type_words(arguments[0]), " and ".join(limits)]).rstrip()
    if origin is Literal:
        return " | ".join(str(a) for a in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_words(a) for a in arguments)
    if origin is list:
        return f"list of {_type_words(arguments[0])}"
    if origin is tuple:
        word, *bounds = _type_words(arguments[0]).split(" ")
        return " ".join([f"list of {len(arguments)} {word}s", *bounds])
    if origin is dict:
        return "mapping"
    return _WORDS.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _yaml_word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value) or '""'
