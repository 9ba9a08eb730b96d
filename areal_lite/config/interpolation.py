"""Replace ``${...}`` in the values of a config, with OmegaConf's syntax.

``${section.key}`` is another value of the config or its default, ``${oc.env:NAME}`` an environment variable,
``${oc.env:NAME,default}`` the variable or else the default, and ``\\${`` a literal ``${``. A value that is a single
reference keeps its type; a variable whose key does not take text is read as YAML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from areal_lite.errors import ConfigError

_OPENING = re.compile(r"(?<!\\)\$\{")
_BORDER = re.compile(r"\$\{|\}")
Key = tuple[str, ...]


class _Variable(str):
    """The text of an environment variable."""


class Interpolation:
    """Resolves the references of one config.

    Args:
        values: The config as nested mappings and lists; :meth:`resolve` replaces its texts.
        where: Start of error texts.
        default_of: Returns the default of a key that the config lacks; raises ConfigError if it has none.
        read_variable: Returns the value of an environment variable for the key that it becomes the value of.
    """

    def __init__(
        self,
        values: MutableMapping[str, Any],
        *,
        where: str,
        environ: Mapping[str, str],
        default_of: Callable[[Key], Any],
        read_variable: Callable[[Key, str], Any],
    ) -> None:
        self.sources: dict[str, str] = {}
        """By dotted key, each value as it was written."""
        self._values = values
        self._where = where
        self._environ = environ
        self._default_of = default_of
        self._read_variable = read_variable
        self._known: dict[Key, Any] = {}
        self._open: list[Key] = []

    def resolve(self) -> None:
        """Replace all references.

        Raises:
            ConfigError: If a key is unknown, a variable unset, a reference unfinished, or references form a cycle; all
                errors, one per line.
        """
        errors: dict[str, None] = {}
        for holder, place, key in list(_texts(self._values, ())):
            try:
                holder[place] = self._value(key, holder[place])
            except ConfigError as error:
                errors.setdefault(str(error))
        if errors:
            raise ConfigError("\n".join(errors))

    def _value(self, key: Key, written: str) -> Any:
        if key in self._known:
            return self._known[key]
        if "${" not in written:
            return written
        self.sources[".".join(key)] = written
        where = f"{self._where}: {'.'.join(key)}: {written!r}"
        if key in self._open:
            cycle = [*self._open[self._open.index(key) :], key]
            raise ConfigError(f"{where}: {' needs '.join('.'.join(one) for one in cycle)}: give one of them a value")
        self._open.append(key)
        try:
            value = self._replaced(written, where)
        finally:
            self._open.pop()
        self._known[key] = self._read_variable(key, value) if isinstance(value, _Variable) else value
        return self._known[key]

    def _replaced(self, text: str, where: str) -> Any:
        pieces = []
        after = 0
        while opening := _OPENING.search(text, after):
            end = _end(text, opening.end())
            if end is None:
                raise ConfigError(f"{where}: ${{ without its }}: close it, or write \\${{ for the text itself")
            value = self._term(str(self._replaced(text[opening.end() : end - 1], where)), where)
            if (opening.start(), end) == (0, len(text)):
                return value
            if isinstance(value, dict | list):
                reference, kind = text[opening.start() : end], type(value).__name__
                raise ConfigError(f"{where}: {reference} is a {kind}: text can hold only single values")
            pieces += [_plain(text[after : opening.start()]), str(value)]
            after = end
        return "".join([*pieces, _plain(text[after:])])

    def _term(self, reference: str, where: str) -> Any:
        resolver, colon, argument = reference.partition(":")
        if not colon:
            return self._referenced(tuple(reference.strip().replace("[", ".").replace("]", "").split(".")), where)
        if resolver.strip() != "oc.env":
            raise ConfigError(f"{where}: no resolver {resolver.strip()!r}: use ${{oc.env:NAME}} or ${{section.key}}")
        name, comma, default = (part.strip() for part in argument.partition(","))
        if name in self._environ:
            return _Variable(self._environ[name])
        if not comma:
            raise ConfigError(
                f"{where}: the environment variable {name!r} is not set: export it, or write ${{oc.env:{name},default}}"
            )
        return None if default == "null" else _Variable(default.strip("'\""))

    def _referenced(self, key: Key, where: str) -> Any:
        value: Any = self._values
        for depth, name in enumerate(key):
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict | None):
                try:
                    return self._default_of(key)
                except ConfigError as error:
                    raise ConfigError(f"{where}: {error}") from None
            else:
                raise ConfigError(f"{where}: {'.'.join(key[:depth])} is {value!r}, not a section")
        if isinstance(value, dict | list):
            for holder, place, inner in list(_texts(value, key)):
                holder[place] = self._value(inner, holder[place])
        return self._value(key, value) if isinstance(value, str) else value


def _end(text: str, start: int) -> int | None:
    """Return the end of the reference whose inside begins at ``start``; None if it has none."""
    depth = 1
    for border in _BORDER.finditer(text, start):
        depth += -1 if border[0] == "}" else 1
        if not depth:
            return border.end()
    return None


def _plain(text: str) -> str:
    return text.replace("\\${", "${")


def escaped(value: Any) -> Any:
    """Return nested values whose texts :class:`Interpolation` reads back unchanged."""
    if isinstance(value, dict):
        return {key: escaped(one) for key, one in value.items()}
    if isinstance(value, list):
        return [escaped(one) for one in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _texts(holder: Any, key: Key) -> Any:
    """Yield each text in nested mappings and lists: what holds it, its place there, and its key."""
    entries = holder.items() if isinstance(holder, dict) else enumerate(holder)
    for place, value in entries:
        inner = (*key, str(place))
        if isinstance(value, str):
            yield holder, place, inner
        elif isinstance(value, dict | list):
            yield from _texts(value, inner)
