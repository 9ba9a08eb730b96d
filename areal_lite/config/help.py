"""List every config key with type, default and meaning, read from the config classes."""

from __future__ import annotations

import dataclasses
import difflib
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from areal_lite.config.rollout_config import RunIdentity
from areal_lite.config.schema import section_of
from areal_lite.errors import ConfigError

_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null", Any: "anything"}
TOP, ALL = "run", "all"
"""Names for the keys outside of sections, and for all keys."""
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


def meaning_of(record: type[Any], name: str) -> str:
    """Return the docstring of a field as plain text on one line, searching base classes; empty if there is none."""
    infos = [getattr(base, "__pydantic_fields__", {}).get(name) for base in record.__mro__]
    docstring = next((info.description for info in infos if info and info.description), "")
    return " ".join(docstring.replace("``", "").split())


def section_list(root: type[Any], width: int = 80) -> str:
    """Return the sections of ``root`` with a line each, wrapped to ``width`` columns."""
    keys, meanings = Counter[str](), {TOP: "Keys outside of sections."}
    for entry in describe_fields(root):
        section, dot, _ = entry.key.partition(".")
        if entry.type == "section" and not dot:
            meanings[section] = entry.meaning
        elif entry.type != "section":
            keys[section if dot else TOP] += 1
    meanings[ALL], keys[ALL] = "All of them.", keys.total()
    indent = max(map(len, meanings)) + 2
    return "\n".join(
        textwrap.fill(
            f"{name:{indent}}{meaning} {keys[name]} key{'s' * (keys[name] > 1)}.", width, subsequent_indent=" " * indent
        )
        for name, meaning in meanings.items()
    )


def help_text(root: type[Any], name: str, width: int = 80) -> str:
    """Return the help of a section, a key, the keys outside of sections (``run``) or all keys (``all``)."""
    if name not in (TOP, ALL):
        return explain(name, [root], width)
    entries = list(describe_fields(root))
    sections = {entry.key for entry in entries if entry.type == "section"}
    outside = [entry for entry in entries if entry.key.partition(".")[0] not in sections]
    shown = entries if name == ALL else outside
    return "\n".join(line for entry in shown for line in _entry(entry, width))


def explain(key: str, roots: Sequence[type[Any]], width: int = 80) -> str:
    """Return the help of one key: of a section all its keys, of a last part such as ``group_size`` every key with it.

    A section in a section is one entry, which says how to list it.
    """
    known = {entry.key: entry for root in reversed(roots) for entry in describe_fields(root)}  # the first root wins
    found = [name for name in known if name == key or name.rpartition(".")[0] == key] or [
        name for name in known if name.endswith(f".{key}")
    ]
    if not found:
        close = difflib.get_close_matches(key, known, 3, 0.5)
        raise ConfigError(f"unknown key {key!r}" + (f"; did you mean {' or '.join(close)}?" if close else ""))
    lines: list[str] = []
    for name in found:
        entry = known[name]
        inner = entry.type == "section" and name != key
        lines += textwrap.wrap(f"{name}: {entry.meaning} --help {name}", width) if inner else _entry(entry, width)
    return "\n".join(lines).lstrip("\n")


def _entry(entry: FieldHelp, width: int) -> list[str]:
    key, kind, default, meaning = entry
    value = "required" if default is None else f"default {default}"
    head = f"{key}  ({kind}; {value})" if kind != "section" or default != "{}" else f"{key}:"
    return [
        *([""] if kind == "section" else []),
        *textwrap.wrap(head, width, subsequent_indent="    ", break_on_hyphens=False),
        *textwrap.wrap(meaning, width, initial_indent="    ", subsequent_indent="    "),
    ]


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
