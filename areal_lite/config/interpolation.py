"""Replace ``${...}`` in the values of a config by OmegaConf.

``${section.key}`` is another value of the config or its default, ``${oc.env:NAME}`` an environment variable,
``${oc.env:NAME,default}`` the variable or else the default, and ``\\${`` a literal ``${``. A value that is a single
reference keeps its type; validation reads numbers, true and false from the text of a variable.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from areal_lite.errors import ConfigError

Key = tuple[str, ...]
_REFERENCE = re.compile(r"(?<!\\)\$\{([^${}:]+)\}")
_LIVE = re.compile(r"(?<!\\)(\\\\)*\$\{")
_MISSING = re.compile(r"(?:Interpolation key '|Error trying to access )([^':]+)")
_UNSET = re.compile(r"Environment variable '(.*?)' not found")


class _Text(NamedTuple):
    path: tuple[Any, ...]
    """Keys and indices from the top."""
    text: str

    @property
    def key(self) -> Key:
        return tuple(map(str, self.path))


def resolve(values: dict[Any, Any], *, where: str, default_of: Callable[[Key], Any]) -> dict[str, str]:
    """Replace the references in ``values`` and return each value as it was written, by dotted key."""
    written = [one for one in _texts(values, ()) if "${" in one.text]
    if not written:
        return {}
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.create(values, flags={"allow_objects": True})
    except OmegaConfBaseException as error:  # a text that is no reference, or a key that is no text
        raise ConfigError(f"{where}: {error.full_key}: {_reason(error)}".replace(": : ", ": ")) from None
    errors: list[str] = []
    for one in written:
        holder: Any = values
        for name in one.path[:-1]:
            holder = holder[name]
        try:
            holder[one.path[-1]] = _value(tree, one, default_of)
        except ConfigError as error:
            errors.append(f"{_at(where, one)}: {error}")
    if errors:
        raise ConfigError("\n".join(errors))
    return {".".join(one.key): one.text for one in written}


def _value(tree: Any, one: _Text, default_of: Callable[[Key], Any]) -> Any:
    """Return the value of one text as plain data; defaults that it needs are added to ``tree``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    added: set[str] = set()
    while True:
        try:
            value = tree
            for name in one.path:
                value = value[name]
            if OmegaConf.is_config(value):
                return OmegaConf.to_container(value, resolve=True)
            for reference in _REFERENCE.finditer(one.text):  # OmegaConf writes a section or list in Python's form
                inner = OmegaConf.select(tree, reference[1].strip())
                if OmegaConf.is_config(inner):
                    kind = "dict" if OmegaConf.is_dict(inner) else "list"
                    raise ConfigError(f"{reference[0]} is a {kind}: text can hold only single values")
            return value
        except OmegaConfBaseException as error:
            missing = _MISSING.search(str(error))
            if missing is None or missing[1] in added:
                raise ConfigError(_reason(error)) from None
            key = missing[1].replace("[", ".").replace("]", "")
            OmegaConf.update(tree, missing[1], default_of(tuple(key.split("."))), force_add=True)
            added.add(missing[1])


def _reason(error: Exception) -> str:
    from omegaconf.errors import GrammarParseError

    said = str(error).splitlines()[0]
    if isinstance(error, GrammarParseError):
        text = said.rpartition(" input ")[2]
        return f"{text}: ${{ without its }}, or nothing to read in it: close it, or write \\${{"
    if unset := _UNSET.search(said):
        name = unset[1]
        return f"the environment variable {name!r} is not set: export it, or write ${{oc.env:{name},default}}"
    if said.startswith("Unsupported interpolation type "):
        return f"no resolver {said.split()[-1]!r}: use ${{oc.env:NAME}} or ${{section.key}}"
    if "Recursive" in said:
        return "it refers to itself through other keys: give one of them a value"
    return said


def _at(where: str, one: _Text) -> str:
    return f"{where}: {'.'.join(one.key)}: {one.text!r}"


def check_resolved(values: dict[Any, Any], *, where: str) -> None:
    """Refuse references in a config that a run wrote, which has none: they would read this machine's environment."""
    for one in _texts(values, ()):
        if _LIVE.search(one.text):
            raise ConfigError(f"{_at(where, one)}: the config of a run refers to nothing: somebody changed it")


def _texts(value: Any, path: tuple[Any, ...]) -> Iterator[_Text]:
    if isinstance(value, str):
        yield _Text(path, value)
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, (*path, name))
