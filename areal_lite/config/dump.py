"""A config as YAML text that loads back to an equal config, except that API keys and tokens are masked."""

import dataclasses
import re
from typing import Any
import yaml
from areal_lite.config.run_config import ExperimentConfig
from areal_lite.files.safe_text import HIDDEN, SECRET_KEY, without_secrets

# YAML 1.1 reads 1e-5 as a string; users mean the number.
FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")


class _Dumper(yaml.SafeDumper):
    """SafeDumper whose output :func:`~areal_lite.config.yaml_text.parse_yaml` reads back unchanged; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, value: str) -> yaml.ScalarNode:
        # Only double quotes escape these line breaks; otherwise they are read back as a space.
        style = '"' if {"\x85", "\u2028", "\u2029"} & set(value) else None
        return self.represent_scalar("tag:yaml.org,2002:str", value, style)


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def dump_config(config: ExperimentConfig) -> str:
    return write_yaml(plain(dataclasses.asdict(config)))


def write_yaml(values: Any, *, flow: bool = False) -> str:
    """Return ``values`` as YAML; on one line with ``flow``."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow)
    return text.removesuffix("...\n").strip() if flow else text


def plain(value: Any, key: Any = "") -> Any:
    """Return nested values, ``value`` being that of ``key``, as a config file can hold them. API keys and tokens are
    hidden, and no text is a reference to :mod:`areal_lite.config.interpolation`."""
    if isinstance(value, dict):
        return {name: plain(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if value and SECRET_KEY.search(str(key)):
        return HIDDEN
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", without_secrets(value, named=False))
