"""``areal-lite rescore``: the rewards of dumped episodes compared with those of a new function."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_lite.tools.inspect.commands.inspect import add_selection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Scores dumped episodes with another reward function; changes nothing. See docs/verify.md."
    add_selection(parser)
    add = parser.add_argument
    add("--reward", required=True, metavar="PKG.FN", help="fn(prompt, completion, prompt_ids, completion_ids, **row)")
    add("--dataset", type=Path, metavar="CONFIG", help="config with the dataset rows (default: RUN/config.yaml)")
    add("--json", action="store_true", help="one JSON object per episode")


def run(options: argparse.Namespace) -> int:
    from areal_lite.tools.inspect.rescore import rescore

    filter = " ".join(options.filter)
    rescore(options.path, options.reward, filter=filter, dataset=options.dataset, json=options.json)
    return 0
