"""``areal-lite config``, and the arguments of every command that reads a config."""

from __future__ import annotations

import argparse
import logging
import os
import pydoc
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from areal_lite.config.help import explain, help_text, section_list
from areal_lite.config.loader import describe_value, dump_config, load_config
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.config.supervised_config import KINDS

C = TypeVar("C", bound=ExperimentConfig)
logger = logging.getLogger(__name__)
_SPINS = "10000"
"""Spins before a waiting torch thread sleeps, about half a millisecond: longer than from one operation to the next,
which is then twice as fast."""


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
    if not _computes_side_by_side(config):
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # servers inherit it
    return config


def _computes_side_by_side(config: ExperimentConfig) -> bool:
    """Return whether several processes of the run compute at the same time on this machine's cores."""
    if not isinstance(config, RunConfig) or config.rollout.addresses:
        return False
    return config.rollout.max_head_offpolicyness > 0 or config.server.replicas > 1


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
        print(explain(values, [RunConfig, *KINDS.values()]), flush=True)
        if namespace.config is not None:
            given = namespace.overrides or []
            print(describe_value(namespace.config, given, values, root=ExperimentConfig), flush=True)
        parser.exit()
