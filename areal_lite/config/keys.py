"""The keys of the config classes: all of them with type, default and meaning, or one by its dotted path."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from areal_lite.config.rollout_config import RunIdentity
from areal_lite.config.schema import meaning_of

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


def field_type(owner: type[Any], name: str) -> Any:
    """Return the annotation of a field, or None if there is no such field."""
    return typing.get_type_hints(owner).get(name) if name in owner.__pydantic_fields__ else None


def owners(root: type[Any], key: Sequence[str]) -> Iterator[tuple[type[Any] | None, str]]:
    """Yield each part of a dotted key with the config class that may have it; None below a value or an unknown key."""
    owner: type[Any] | None = root
    for name in key:
        yield owner, name
        owner = section_of(field_type(owner, name)) if owner else None


def takes_text(root: type[Any], key: Sequence[str]) -> bool:
    """Return whether the value at a dotted key may be text; below a free-form mapping it may."""
    for owner, name in owners(root, key):
        annotation = field_type(owner, name) if owner else None
        if section_of(annotation) is None:
            return annotation is None or bool({str, Any, Literal} & _kinds(annotation))
    return False


def _kinds(annotation: Any) -> set[Any]:
    inner = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    return {origin} if origin is Literal else {annotation, *(kind for one in inner for kind in _kinds(one))}


def section_of(annotation: Any) -> type[Any] | None:
    """Return the config class in ``Class`` or ``Class | None``, else None."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    return None


def is_mapping(annotation: Any) -> bool:
    """Return whether an annotation is a free-form mapping, or one of its alternatives is."""
    return any(typing.get_origin(kind) is dict for kind in (annotation, *typing.get_args(annotation)))
