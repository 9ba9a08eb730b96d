"""``areal-lite verify``: its arguments; the exit code is 1 if it found something."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--reward", metavar="PKG.FN", help="the run's reward function: score its episodes again")


def run(options: argparse.Namespace) -> int:
    from areal_lite.tools.verify.verify import verify

    return verify(options.path, reward=options.reward)
