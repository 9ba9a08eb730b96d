"""The keys of the config classes: all of them with type, default and meaning, or one by its dotted path."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from areal_lite.config.dump import write_yaml
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
    """Yield the fields of a config class, those of a section after it, but not its copies of :class:`RunIdentity`."""
    hints = typing.get_type_hints(root, include_extras=True)
    for field in dataclasses.fields(root):
        if prefix and issubclass(root, RunIdentity) and field.name in RunIdentity.__dataclass_fields__:
            continue
        info: FieldInfo = root.__pydantic_fields__[field.name]
        key = prefix + field.name
        section = section_of(hints[field.name])
        meaning = meaning_of(root, field.name)
        if section is None:
            default = None if info.is_required() else write_yaml(info.get_default(call_default_factory=True), flow=True)
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


def field_type(owner: type[Any], name: str) -> Any:
    """Return the annotation of a field, or None if there is no such field."""
    return typing.get_type_hints(owner).get(name) if name in owner.__pydantic_fields__ else None


def owners(root: type[Any], key: Sequence[str]) -> Iterator[tuple[type[Any] | None, str]]:
    """Yield each part of a dotted key with the config class that may have it; None below a value or an unknown key."""
    owner: type[Any] | None = root
    for name in key:
        yield owner, name
        owner = section_of(field_type(owner, name)) if owner else None


def section_of(annotation: Any) -> type[Any] | None:
    """Return the config class in ``Class`` or ``Class | None``, else None."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    return None
