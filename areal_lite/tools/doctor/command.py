"""``areal-lite doctor``, and ``--dry-run`` of the commands that train."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from areal_lite.config.run_config import RunConfig
from areal_lite.errors import ConfigError
from areal_lite.files.safe_text import printable
from areal_lite.tools.run.config import load_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks packages, devices, memory and disk; with CONFIG also model, tokenizer, servers, one episode and one "
        "training step. Changes nothing. Exit code 0: nothing to fix. With --from it compares the config of another "
        "system instead: what to write here, and which of our defaults differ from the origin's."
    )
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="a config of any kind of run")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="override one value")
    parser.add_argument(
        "--from", dest="origin", choices=("verl", "slime", "areal"), help="CONFIG is of that system: what to write here"
    )
    parser.add_argument("--json", action="store_true", help="with --from: print one JSON object")
    parser.set_defaults(root=RunConfig)


def run(options: argparse.Namespace) -> int:
    if options.origin is not None or options.json:
        return _ported(options)
    from areal_lite.tools.doctor.doctor import doctor

    code = doctor(options.config, options.overrides, show=lambda finding: print(finding, flush=True))
    if code:
        print("fix the lines that begin with fix, and run doctor again")
    else:
        print("nothing to fix" + (f"; next: areal-lite plan {options.config}" if options.config else ""))
    return code


def _ported(options: argparse.Namespace) -> int:
    """Print what a config of another system means here."""
    if options.origin is None:
        raise ConfigError("--json is for --from: name the system whose config it is, --from verl, slime or areal")
    if options.config is None or options.overrides:
        raise ConfigError(f"--from {options.origin} compares one file: give CONFIG, and no key=value")
    from areal_lite.tools.doctor.ported import ported

    result = ported(options.origin, options.config)
    if options.json:
        print(json.dumps({**asdict(result), "keys": [each._asdict() for each in result.keys]}, default=str))
    else:
        print("\n".join(map(printable, result.lines())))
    return 0


def dry_run(options: argparse.Namespace) -> int:
    """Check everything that the command of ``options`` checks, and start nothing."""
    config = load_run(options, options.root)
    from areal_lite.tools.doctor.doctor_run import dry_run

    for finding in dry_run(config):
        print(finding.text, flush=True)
    print("nothing was started; areal-lite doctor also tries servers, an episode and a training step")
    return 0
