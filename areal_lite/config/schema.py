"""Strictness and number types that all config records share, and how to look up a dotted key in them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, use_attribute_docstrings=True)
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def field_type(owner: type[Any], name: str) -> Any:
    """Return the annotation of a field, or None if there is no such field."""
    return typing.get_type_hints(owner).get(name) if name in owner.__pydantic_fields__ else None


def keys(root: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config class, those of each section after it."""
    for name in root.__pydantic_fields__:
        yield prefix + name
        if (section := section_of(field_type(root, name))) is not None:
            yield from keys(section, f"{prefix}{name}.")


def meaning_of(record: type[Any], name: str) -> str:
    """Return the docstring of a field as plain text on one line, searching base classes; empty if there is none."""
    infos = [getattr(base, "__pydantic_fields__", {}).get(name) for base in record.__mro__]
    docstring = next((info.description for info in infos if info and info.description), "")
    return " ".join(docstring.replace("``", "").split())


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
