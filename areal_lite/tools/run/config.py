"""``areal-lite config``, and arguments and help of every command that reads a config."""

import argparse
import logging
import os
import pydoc
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar
from areal_lite.config.dump import dump_config
from areal_lite.config.keys import FieldHelp, describe_fields
from areal_lite.config.loader import KINDS, class_of, describe_value, load_config
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.errors import ConfigError, did_you_mean

C = TypeVar("C", bound=ExperimentConfig)
logger = logging.getLogger(__name__)
TOP, ALL = "run", "all"
"""Names for the keys outside of sections, and for all keys."""
SPINS = "10000"
"""Spins before a waiting torch thread sleeps, about 0.5 ms: longer than between operations, which get twice as fast."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, ExperimentConfig)
    parser.add_argument("--explain", action=_Explain, metavar="KEY", help="what a key means; no file needed")


def run(options: argparse.Namespace) -> int:
    print(dump_config(load_config(options.config, options.overrides, root=ExperimentConfig)), end="")
    return 0


def add_config(parser: argparse.ArgumentParser, root: type[ExperimentConfig]) -> None:
    """Add a config of the class ``root``, its overrides, and a ``--help`` that knows its sections."""
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="override one value: dotted key, YAML value")
    parser.add_argument("-h", "--help", action=_ConfigHelp)
    parser.set_defaults(root=root)


def load_run(options: argparse.Namespace, root: type[C]) -> C:
    """Load the config of a command that is about to import torch; raises ConfigError."""
    config = load_config(options.config, options.overrides, root=root)
    logger.info("%s %s: loading torch and transformers", options.command, options.config)
    computes_side_by_side = (  # several processes of the run, at the same time on this machine's cores
        isinstance(config, RunConfig)
        and not config.rollout.addresses
        and (config.rollout.max_head_offpolicyness > 0 or config.server.replicas > 1)
    )
    if not computes_side_by_side:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # servers inherit it
    return config


class _ConfigHelp(argparse.Action):
    """``--help`` that also lists the sections of the config, or the keys of one."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        text = "show this help, or the keys of a SECTION of the config"
        super().__init__(option_strings, dest, nargs="?", metavar="SECTION", help=text)

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, *_: object) -> NoReturn:
        root = parser.get_default("root")
        if values is None:
            hint = f"{parser.prog} --help SECTION shows the keys of a section:"
            _page(f"{parser.format_help()}\n{hint}\n\n{section_list(root)}")
        else:
            _page(help_text(root, values, min(120, shutil.get_terminal_size((120, 50)).columns)))
        parser.exit()


def _page(text: str) -> None:
    """Print text, on a terminal by its pager."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        os.environ.setdefault("LESS", "-FRX")
        pydoc.pager(text)
    else:
        print(text, flush=True)


class _Explain(argparse.Action):
    """Print the meaning of a config key and, after the name of a config, its value there and the value's source."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *_: object) -> NoReturn:
        print(explain(values, [RunConfig, *map(class_of, KINDS)]), flush=True)
        if namespace.config is not None:
            given = namespace.overrides or []
            print(describe_value(namespace.config, given, values, root=ExperimentConfig), flush=True)
        parser.exit()


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
    shown = entries if name == ALL else [entry for entry in entries if entry.key.partition(".")[0] not in sections]
    return "\n".join(line for entry in shown for line in _entry(entry, width))


def explain(key: str, roots: Sequence[type[Any]], width: int = 80) -> str:
    """Return the help of one key: of a section all its keys, of a last part such as ``group_size`` every key with it. A
    section in a section is one entry, which says how to list it."""
    known = {entry.key: entry for root in reversed(roots) for entry in describe_fields(root)}  # the first root wins
    found = [name for name in known if name == key or name.rpartition(".")[0] == key] or [
        name for name in known if name.endswith(f".{key}")
    ]
    if not found:
        raise ConfigError(f"unknown key {key!r}{did_you_mean(key, known, count=3)}")
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
