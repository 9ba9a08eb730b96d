"""``areal-lite rollout`` and ``eval``: episodes on the training or the held-out rows, without training."""

import argparse
import shlex
from collections import Counter
from typing import TYPE_CHECKING
from areal_lite.config.run_config import RolloutConfig, RunConfig
from areal_lite.processes.quick_import import is_first_rank
from areal_lite.tools.run.config import add_config, load_run

if TYPE_CHECKING:
    from areal_lite.trainer.metrics import OnStep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, RolloutConfig)


def run(options: argparse.Namespace) -> int:
    config = load_run(options, RolloutConfig)
    from areal_lite.tools.inspect.episode_text import stdout_console
    from areal_lite.tools.run.progress import server_table

    last: dict[str, float] = {}
    make_episodes = _evaluate if options.command == "eval" else _rollout
    try:
        make_episodes(config, lambda step, metrics: last.update(metrics))
    finally:  # an error may be one of the servers
        if table := server_table(last, config.rollout.addresses, config.server.backend):
            stdout_console().print(table)
    if is_first_rank():
        again = ["train", options.config, *options.overrides]
        following = ["inspect", str(config.run_dir)] if config.rollout.dump_to_file else again
        print(f"next: areal-lite {shlex.join(following)}")
    return 0


def _rollout(config: RunConfig, on_step: "OnStep") -> None:
    from areal_lite.rollout.episodes.ended_groups import advice
    from areal_lite.runs.entry_points import run_rollout

    results = run_rollout(config, on_step=on_step)
    rewards = [reward for result in results for reward in result.rewards]
    counts = ", ".join(f"{count} {status}" for status, count in Counter(r.status for r in results).items())
    mean = sum(rewards) / max(1, len(rewards))
    print(f"groups: {counts}; mean reward {mean:.3f} over {len(rewards)} episodes")
    if not rewards and (fix := advice(result.rejection for result in results if result.rejection)):
        print(fix)


def _evaluate(config: RunConfig, on_step: "OnStep") -> None:
    from areal_lite.runs.entry_points import run_evaluation

    result = run_evaluation(config, on_step=on_step)
    print(f"held-out reward {result.reward:.3f} over {result.episodes} episodes, {result.failed} failed")
