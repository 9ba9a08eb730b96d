"""``areal-lite sweep``: its arguments, the runs, and the table that compares them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from areal_lite.config.run_config import RunConfig
from areal_lite.errors import ConfigError
from areal_lite.runs.commands.supervised import train_supervised
from areal_lite.runs.commands.train import train
from areal_lite.tools.argument_types import positive_integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains each variant with each seed, one run after the other, and shows means with intervals. Variants are "
        "configs, or values of key=v1,v2; each is compared with the first, seed by seed. The same command continues a "
        "sweep. See docs/plan.md."
    )
    add = parser.add_argument
    add("words", metavar="CONFIG.yaml | key=v1,v2", nargs="+", help="one or more configs, and values for all of them")
    add("--seeds", type=positive_integer, required=True, metavar="N", help="runs of each variant")
    add("--metric", metavar="NAME", help="what is compared (default: eval/reward, else train/reward_mean, else a loss)")
    add("--level", type=_fraction, default=0.95, metavar="P", help="level of the intervals (default: 0.95)")
    add("--out", type=Path, metavar="FILE.png", help="image file (default: sweep.png in the experiment's folder)")
    parser.set_defaults(root=RunConfig)


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from areal_lite.tools.inspect.plot import plot_means
    from areal_lite.tools.sweep.sweep import results_of, run_sweep, sweep_table, variants_of, verdict_lines

    overrides = [word for word in options.words if "=" in word]
    paths = [word for word in options.words if "=" not in word]
    variants = variants_of(paths, overrides, seeds=options.seeds)
    run_sweep(variants, _make_run)
    metric, results = results_of(variants, metric=options.metric, level=options.level)
    Console().print(sweep_table(metric, results, level=options.level))
    for line in verdict_lines(results):
        print(line)
    folder = variants[0].run_dirs[0].parent
    try:
        runs = {variant.name: variant.run_dirs for variant in variants}
        print(f"curves: {plot_means(runs, out=options.out or folder / 'sweep.png', level=options.level)}")
    except ConfigError as error:
        print(f"no curves: {error}")
    print(f"next: areal-lite view {folder}")
    return 0


def _make_run(config: Any, title: str) -> None:
    print(title, flush=True)
    if isinstance(config, RunConfig):
        train(config)
    else:
        train_supervised(config)


def _fraction(text: str) -> float:
    if not 0 < (number := float(text)) < 1:
        raise ValueError
    return number
