"""``areal-lite train``: reinforcement learning with evaluation."""

from __future__ import annotations

import argparse

from areal_lite.config.run_config import RunConfig
from areal_lite.processes.quick_import import is_first_rank, quick_import
from areal_lite.tools.run.config import add_config, load_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, RunConfig)


def run(options: argparse.Namespace) -> int:
    config = load_run(options, RunConfig)
    train(config)
    if is_first_rank():
        print(f"next: areal-lite view {config.run_dir}")
    return 0


def train(config: RunConfig) -> None:
    """Train with a progress bar; the first rank prints the summary and the table of servers."""
    with quick_import():
        from areal_lite.runs.entry_points import run_training
        from areal_lite.tools.run.progress import TrainingProgress, server_table, summary_table

    with TrainingProgress(config.trainer.total_steps) as progress:
        summary = run_training(config, on_step=progress.on_step)
    if is_first_rank():
        progress.console.print(summary_table(summary))
        if table := server_table(progress.last, config.rollout.addresses):
            progress.console.print(table)
        print(f"written to {summary.run_dir}")
