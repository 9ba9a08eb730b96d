"""``areal-lite replay``: its arguments, progress and summary."""

import argparse
from pathlib import Path
from areal_lite.config.dotted_path import importing
from areal_lite.files.safe_text import printable
from areal_lite.processes.quick_import import is_first_rank
from areal_lite.tools.argument_types import add_trust


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN", help="a run's folder with dumps (rollout.dump_to_file)")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="override a key that concerns training")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    from areal_lite.tools.replay.replay import plan_replay, run_replay, same_weights
    from areal_lite.tools.run.progress import TrainingProgress, summary_table

    with importing(allowed=options.trust_config):
        replay = plan_replay(options.path, options.overrides)
        with TrainingProgress(replay.total_steps) as progress:
            summary = run_replay(replay, on_step=progress.on_step)
    if not is_first_rank():
        return 0
    progress.console.print(summary_table(summary))
    recorded, wanted = len(replay.batches), replay.config.trainer.steps
    if recorded < wanted:
        print(f"{options.path} has the batches of {recorded} steps, and trainer.total_steps is {wanted}")
    if replay.is_same and (same := same_weights(options.path, summary.run_dir)) is not None:
        print(f"the weights {'equal' if same else 'differ from'} those of {options.path}/model")
    plot = f"plot {options.path} {summary.run_dir} --out {summary.run_dir / 'metrics.png'}"
    print(printable(f"written to {summary.run_dir}\nnext: areal-lite {plot}"))
    return 0
