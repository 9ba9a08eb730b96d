"""``areal-lite inspect``: runs, versions, groups, episodes and turns of dumps; and how commands select episodes."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_lite.tools.argument_types import positive_integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows runs, versions, groups, episodes or turns of dumps. docs/trajectories.md has the filter keys."
    )
    add_selection(parser)
    add = parser.add_argument
    add("--by", choices=("runs", "versions", "groups", "episodes", "turns", "problems"), help="what to list")
    add("--sort", default="version", metavar="KEY", help="a filter key, with - before it for descending")
    add("--limit", type=positive_integer, metavar="N", help="at most N (default: 50, of turns 10; with --json all)")
    add("--offset", type=int, default=0, metavar="N", help="leave out the first N")
    add("--sample", type=positive_integer, metavar="N", help="N random episodes")
    add("--seed", type=int, default=0, metavar="S", help="seed of --sample")
    add("--json", action="store_true", help="one JSON object per line: of an episode its dumped line with run and id")
    add("--diff", nargs=2, metavar="ID", help="where two episodes begin to differ; an ID is FILE:LINE, as listed")
    add("--tokens", metavar="ID", help="each token of an episode: id, text, whether it trains, log-prob, version")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the folder or file of dumps, and the filter that selects episodes of it."""
    parser.add_argument(
        "path", type=Path, metavar="RUN", help="a run's folder, a folder of runs, a folder of dumps, or a dump"
    )
    parser.add_argument(
        "filter",
        nargs="*",
        metavar="FILTER",
        help="such as 'reward<0.5 status=failed text~\"not sure\"' (quote < and >)",
    )


def run(options: argparse.Namespace) -> int:
    from areal_lite.tools.inspect import terminal

    chosen = {name: getattr(options, name) for name in terminal.Options.__dataclass_fields__ if name != "filter"}
    terminal.inspect(options.path, terminal.Options(filter=" ".join(options.filter), **chosen))
    return 0
