"""``areal-lite continue``: its arguments, and the folder with the branches."""

import argparse
from pathlib import Path
from areal_lite.config.dotted_path import importing
from areal_lite.files.safe_text import printable
from areal_lite.tools.argument_types import add_trust, positive_integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="RUN", help="a run's folder with dumps")
    add("overrides", metavar="key=value", nargs="*", help="override a key of the run's config")
    add("--task", required=True, metavar="ID", help="task_id of the episode")
    add("--turn", required=True, type=int, metavar="K", help="turn_idx in the dump; all turns before it are kept")
    add("--member", type=int, default=0, metavar="M", help="member_idx of the episode (default: 0)")
    add("--model", metavar="PATH", help="model or checkpoint that answers (default: RUN's model, or last checkpoint)")
    add("--address", metavar="HOST:PORT", help="running server that answers")
    add("--say", metavar="TEXT", help="replace the last user message before the turn; of agents only")
    add_trust(parser)
    add("--n", type=positive_integer, default=1, metavar="N", help="branches (default: 1)")


def run(options: argparse.Namespace) -> int:
    from areal_lite.tools.replay.continue_episode import continue_episode

    with importing(allowed=options.trust_config):
        run_dir = continue_episode(options)
    print(printable(f"written to {run_dir}\nnext: areal-lite view {options.path} {run_dir}"))
    return 0
