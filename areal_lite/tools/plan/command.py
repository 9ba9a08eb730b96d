"""``areal-lite plan``: its arguments, and the table of predictions."""

import argparse
import json
import shlex
import sys
from typing import Any
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.processes.quick_import import is_first_rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", metavar="CONFIG.yaml", help="a config of any kind of run")
    add("overrides", metavar="key=value", nargs="*", help="override one value")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(root=RunConfig)


def run(options: argparse.Namespace) -> int:
    from areal_lite.tools.inspect.episode_text import stdout_console
    from areal_lite.tools.plan.plan import plan, plan_table

    config: Any = load_config(options.config, options.overrides, root=ExperimentConfig)
    if is_first_rank():
        print("trying the first steps in a temporary folder ...", file=sys.stderr)
    made = plan(config, on_step=lambda step, metrics: print(f"step {step}", file=sys.stderr))
    if made is None:
        return 0
    if options.json:
        print(json.dumps(made._asdict()))
        return 0
    stdout_console().print(plan_table(made))
    print(f"not in it: {'; '.join(made.unknown)}")
    command = getattr(config, "kind", "train").replace("_", "-")
    print(f"next: areal-lite {shlex.join([command, options.config, *options.overrides])}")
    return 0
