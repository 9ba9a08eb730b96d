"""``areal-lite doctor``, and ``--dry-run`` of the commands that train."""

from __future__ import annotations

import argparse

from areal_lite.config.run_config import RunConfig
from areal_lite.tools.run.config import load_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks packages, devices, memory and disk; with CONFIG also model, tokenizer, servers, one episode and one "
        "training step. Changes nothing. Exit code 0: nothing to fix."
    )
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="a config of any kind of run")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="override one value")
    parser.set_defaults(root=RunConfig)


def run(options: argparse.Namespace) -> int:
    from areal_lite.tools.doctor.doctor import doctor

    code = doctor(options.config, options.overrides, show=lambda finding: print(finding, flush=True))
    if code:
        print("fix the lines that begin with fix, and run doctor again")
    else:
        print("nothing to fix" + (f"; next: areal-lite plan {options.config}" if options.config else ""))
    return code


def dry_run(options: argparse.Namespace) -> int:
    """Check everything that the command of ``options`` checks, and start nothing."""
    config = load_run(options, options.root)
    from areal_lite.tools.doctor.doctor_run import dry_run

    for finding in dry_run(config):
        print(finding.text, flush=True)
    print("nothing was started; areal-lite doctor also tries servers, an episode and a training step")
    return 0
