"""``areal-lite doctor``, and ``--dry-run`` of the commands that train: is everything there that a run needs?

A check yields findings. If it raises, the error is a finding to fix: errors of areal_lite say value, rule and fix, and
the first one decides the exit code. Checks write only to a temporary folder: the run's folder does not change.
"""

import argparse
import json
import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.config.supervised_config import SupervisedConfig
from areal_lite.errors import ArealLiteError, ConfigError
from areal_lite.files.safe_text import printable
from areal_lite.tools.doctor.doctor_machine import Finding, Findings, devices, machine, ok, packages, warning
from areal_lite.tools.run.config import load_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, origins = parser.add_argument, ("verl", "slime", "areal")
    add("config", metavar="CONFIG.yaml", nargs="?", help="a config of any kind of run")
    add("overrides", metavar="key=value", nargs="*", help="override one value")
    add("--from", dest="origin", choices=origins, help="CONFIG is of that system: what to write here")
    add("--template", action="store_true", help="CONFIG is a model: does its chat template keep history byte for byte")
    add("--json", action="store_true", help="with --from: print one JSON object")
    parser.set_defaults(root=RunConfig)


def run(options: argparse.Namespace) -> int:
    if options.origin is not None or options.json:
        return _ported(options)
    if options.template:
        return _template(options)
    code = doctor(options.config, options.overrides, show=lambda finding: print(finding, flush=True))
    if code:
        print("fix the lines that begin with fix, and run doctor again")
    else:
        again = shlex.join([options.config, *options.overrides]) if options.config else ""
        print("nothing to fix" + (f"; next: areal-lite plan {again}" if again else ""))
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
        print(json.dumps({**result._asdict(), "keys": [each._asdict() for each in result.keys]}, default=str))
    else:
        print("\n".join(map(printable, result.lines())))
    return 0


def _template(options: argparse.Namespace) -> int:
    if options.config is None or options.overrides:
        raise ConfigError("--template looks at one model: give its folder or hub name, and no key=value")
    from areal_lite.tools.doctor.doctor_template import template_findings

    for finding in template_findings(options.config):
        print(printable(str(finding)))
    return 0


def dry_run(options: argparse.Namespace) -> int:
    """Check everything that the command of ``options`` checks, and start nothing."""
    config = load_run(options, options.root)
    from areal_lite.tools.doctor.doctor_run import dry_run_findings

    for finding in dry_run_findings(config):
        print(finding.text, flush=True)
    print("nothing was started; areal-lite doctor also tries servers, an episode and a training step")
    return 0


def doctor(config: str | None, overrides: Sequence[str], *, show: Callable[[Finding], None]) -> int:
    """Check the machine and, with a config, its run; return the exit code of the first failure, 0 without one."""
    failures: dict[str, int] = {}  # exit codes by text, as several checks need the model

    def passes(check: Findings) -> bool:
        try:
            for finding in check:
                show(finding)
        except Exception as error:  # also of a library, or of the user's code
            text, exit_code = f"{type(error).__name__}: {error}", ArealLiteError.exit_code
            if isinstance(error, ArealLiteError):
                text, exit_code = "\n".join([str(error), *getattr(error, "__notes__", ())]), error.exit_code
            if text not in failures:
                show(Finding("fix", text))
                failures[text] = exit_code
            return False
        return True

    with _warnings_shown(show):
        for check in (packages, devices, machine):
            passes(check())
        if config is not None:
            passes(_check_run(config, overrides, passes))
    return next(iter(failures.values()), 0)


def _check_run(path: str, overrides: Sequence[str], passes: Callable[[Findings], bool]) -> Findings:
    config = load_config(path, overrides, root=ExperimentConfig)
    yield ok(f"{path}: {config.experiment_name}, kind {getattr(config, 'kind', 'reinforcement learning')}")
    from areal_lite.tools.doctor import doctor_model as model
    from areal_lite.tools.doctor import doctor_run as run
    from areal_lite.tools.doctor.doctor_sandbox import sandbox_findings

    assert isinstance(config, RunConfig | SupervisedConfig)
    has_model = passes(model.model_folder(config.model_path))
    fine = [
        has_model and passes(model.tokenizer(config)),
        not isinstance(config, RunConfig) or passes(sandbox_findings(config.rollout.agents.sandbox)),
        passes(run.settings(config)),
        passes(run.cluster(config)),
        passes(run.run_folder(config)),
        has_model and passes(model.room(config)),
    ]
    if all(fine):
        passes(run.supervised(config) if isinstance(config, SupervisedConfig) else run.rollouts(config))
    else:
        tried = "training step" if isinstance(config, SupervisedConfig) else "servers, episode and training step"
        yield warning(f"{tried} not tried: fix the above first")


@contextmanager
def _warnings_shown(show: Callable[[Finding], None]) -> Iterator[None]:
    """Show warnings that areal_lite logs as findings, and no other log lines."""
    from areal_lite.servers.pool import server_pool

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name != server_pool.__name__:  # the check of the servers shows their state
                show(warning(record.getMessage()))

    logger, handler = logging.getLogger("areal_lite"), Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
