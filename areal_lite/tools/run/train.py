"""``areal-lite train``, ``sft``, ``dpo`` and ``reward-model``: training by rewards, on answers or on preferences."""

import argparse
import os
from typing import Any
from areal_lite.config.dump import dump_config
from areal_lite.config.loader import class_of
from areal_lite.config.rules import check_launch
from areal_lite.config.run_config import RunConfig
from areal_lite.processes.quick_import import is_first_rank, quick_import
from areal_lite.tools.run.config import add_config, load_run

_NEXT = {
    "train": "view {run_dir}",
    "sft": "train CONFIG.yaml model_path={run_dir}/model",
    "dpo": "eval CONFIG.yaml model_path={run_dir}/model",
    "reward-model": "train CONFIG.yaml reward_model={run_dir}/model",
}
"""Command that shows the run, or uses the trained model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    name = parser.prog.split()[-1]
    add_config(parser, RunConfig if name == "train" else class_of(name.replace("-", "_")))


def run(options: argparse.Namespace) -> int:
    config = load_run(options, options.root)
    if options.verbose and options.command != "train" and is_first_rank():
        print(dump_config(config), end="")
    check_launch(config)
    if config.launch == "ray" and config.cluster.n_ranks and "RANK" not in os.environ:
        from areal_lite.tools.run.on_nodes import train_on_ranks

        train_on_ranks(config, [options.command, options.config, *options.overrides])
        return 0
    train(config)
    if is_first_rank():
        print(f"next: areal-lite {_NEXT[options.command].format(run_dir=config.run_dir)}")
    return 0


def train(config: Any) -> None:
    """Make a run of any kind with its progress; the first rank prints the summary and the table of servers."""
    with quick_import():
        from areal_lite.tools.run.progress import TrainingProgress, server_table, summary_table

        if isinstance(config, RunConfig):
            from areal_lite.runs.entry_points import run_training as make_run
        else:
            from areal_lite.runs.supervised_run import run_supervised as make_run  # type: ignore[assignment]
    with TrainingProgress(config.trainer.total_steps) as progress:
        summary = make_run(config, on_step=progress.on_step)
    if not is_first_rank():
        return
    if isinstance(config, RunConfig):
        progress.console.print(summary_table(summary))
        if table := server_table(progress.last, config.rollout.addresses, config.server.backend):
            progress.console.print(table)
        print(f"written to {summary.run_dir}")
    else:
        print(f"{summary.steps} steps in {summary.seconds:.0f} s, written to {summary.run_dir}")
