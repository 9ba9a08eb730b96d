"""``areal-lite sft``, ``dpo`` and ``reward-model``: training on given answers or preference pairs."""

from __future__ import annotations

import argparse

from areal_lite.config.dump import dump_config
from areal_lite.config.loader import class_of
from areal_lite.config.supervised_config import DPOConfig, RewardModelConfig, SFTConfig
from areal_lite.processes.quick_import import is_first_rank, quick_import
from areal_lite.tools.run.config import add_config, load_run

_NEXT = {
    "sft": "train CONFIG.yaml model_path",
    "dpo": "eval CONFIG.yaml model_path",
    "reward-model": "train CONFIG.yaml reward_model",
}
"""Command and config key that use the trained model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    name = parser.prog.split()[-1]
    add_config(parser, class_of(name.replace("-", "_")))


def run(options: argparse.Namespace) -> int:
    config = load_run(options, options.root)
    if options.verbose and is_first_rank():
        print(dump_config(config), end="")
    train_supervised(config)
    if is_first_rank():
        print(f"next: areal-lite {_NEXT[options.command]}={config.run_dir / 'model'}")
    return 0


def train_supervised(config: SFTConfig | DPOConfig | RewardModelConfig) -> None:
    """Train with one line per record; the first rank prints the summary after."""
    with quick_import():
        from areal_lite.runs.supervised_run import run_supervised
        from areal_lite.tools.run.progress import progress_line
    summary = run_supervised(config, on_step=lambda step, metrics: print(progress_line(step, metrics), flush=True))
    if is_first_rank():
        print(f"{summary.steps} steps in {summary.seconds:.0f} s, written to {summary.run_dir}")
