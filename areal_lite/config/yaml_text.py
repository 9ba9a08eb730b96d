"""Read YAML text as plain data.

Duplicate keys, aliases that repeat too much and files that are too large are refused.
"""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
import yaml
from areal_lite.config.dump import FLOAT
from areal_lite.errors import ConfigError, did_you_mean

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
"""Most values of a file that uses aliases, each alias counted as what it repeats."""
MAX_DIGITS = 400
Opener = Callable[[Path], BinaryIO]


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                key = (key_node.tag, key_node.value)
                if key in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"duplicate key {key_node.value!r}; keep one", problem_mark=key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)

    def number(self, node: yaml.ScalarNode) -> Any:
        # 1:1:1:... is a number to the base of 60 in YAML 1.1: a megabyte of it takes minutes.
        if len(node.value) > MAX_DIGITS:
            raise yaml.MarkedYAMLError(problem=f"a number of {len(node.value)} digits", problem_mark=node.start_mark)
        if re.fullmatch(r"(?![-+]?[1-9]\d{0,2}(_\d{3})+$)([-+]?0[\d_]+|[^.]*[_:].*)", node.value):  # as 2024_01_15
            return node.value
        return self.construct_yaml_int(node) if node.tag.endswith("int") else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.number)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def read_text(path: Path, opened: Opener | None = None) -> str:
    """Return the text of a file, which may be a pipe, or another reader may open; raises ConfigError with the fix."""
    try:
        with path.open("rb") if opened is None else opened(path) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_close_files(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. Give the path of a YAML file") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: the file is larger than {MAX_BYTES} bytes; is it a config?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8: save the file as UTF-8 text") from None


def _close_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"; there is no folder {folder} either"
    return did_you_mean(path.name, [p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml")], count=3)


def parse_yaml(text: str, *, where: str) -> Any:
    """Return the data of YAML text; raises ConfigError with line and column."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        values, repeats = _count_values(node, {})
        if not repeats or values <= MAX_VALUES:
            return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        context = f"{error.context}: " if error.context else ""
        fix = ": indent with spaces, not with tabs" if "'\\t'" in (error.problem or "") else ""
        raise ConfigError(f"{where}: {place}{context}{error.problem}{fix}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-13-45
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be a config") from None
    raise ConfigError(
        f"{where}: its aliases (*name) repeat values so often that there are over {MAX_VALUES}: use fewer aliases"
    )


def _count_values(node: yaml.Node, known: dict[yaml.Node, int]) -> tuple[int, bool]:
    """Return how many values a node holds with its aliases written out, and whether it has aliases."""
    if node in known:
        return known[node], True
    known[node] = MAX_VALUES + 1  # for an alias inside of what it repeats
    total, repeats = 1, False
    children = node.value if isinstance(node, yaml.CollectionNode) else ()
    for child in itertools.chain.from_iterable(children) if isinstance(node, yaml.MappingNode) else children:
        values, repeated = _count_values(child, known)
        total, repeats = total + values, repeats or repeated
    known[node] = total
    return total, repeats
