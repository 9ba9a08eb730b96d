"""``areal-lite plot``: the metrics of one or several runs as an image."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a folder with a metrics.jsonl")
    add("--out", type=Path, metavar="FILE.png", help="image file (default for a single run: RUN_DIR/metrics.png)")


def run(options: argparse.Namespace) -> int:
    from areal_lite.tools.inspect.plot import plot_metrics

    print(plot_metrics(*options.run_dirs, out=options.out))
    return 0
