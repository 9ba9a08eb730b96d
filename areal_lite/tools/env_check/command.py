"""``areal-lite env-check``: exit code 0 if no defect is found, 1 with defects, 2 if a check could not run."""

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import RunConfig
from areal_lite.data.rows.load_rows import load_rows
from areal_lite.environments.catalog import AGENT, fill
from areal_lite.errors import ConfigError
from areal_lite.files.safe_text import printable
from areal_lite.tools.argument_types import positive_integer
from areal_lite.tools.env_check.conduct import begins, blocking, ends, leaks, raises, repeats, schema, truncation
from areal_lite.tools.env_check.credit import answers, failed_programs, reward_files, rewards
from areal_lite.tools.env_check.play import Defect, Row, Skipped, Subject

Check = Callable[[Subject], Awaitable[None]]
CHECKS: list[Check] = [
    *(begins, repeats, answers, ends, truncation, raises, schema, rewards),
    *(blocking, leaks, failed_programs, reward_files),
]
"""In this order: some look at the episodes of those before."""
_STEPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    named = "PREFIX:NAME, my_module.MyEnv, or CONFIG.yaml with env, its arguments and its rows"
    parser.add_argument("env", metavar="ENV", help=named)
    parser.add_argument("--rows", type=positive_integer, default=8, help="rows to play (default 8)")
    parser.add_argument("--signal", action="store_true", help=f"also run {_STEPS} steps of CONFIG.yaml's model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    config = load_config(options.env, root=RunConfig) if options.env.endswith((".yaml", ".yml")) else None
    if options.signal and config is None:
        raise ConfigError(f"--signal needs a model: give a CONFIG.yaml in place of {options.env}")
    subject = Subject(*_played(options.env, config, options.rows), config)
    report = asyncio.run(check(subject, [*CHECKS, signal] if options.signal else CHECKS))
    print(json.dumps(report._asdict()) if options.json else "\n".join(map(printable, report.lines())))
    return 1 if report.defects else 2 if report.not_run else 0


def _played(env: str, config: RunConfig | None, size: int) -> tuple[dict[str, Any], list[Row]]:
    """Return the arguments of the agent, and rows; raises ConfigError."""
    if config is not None:
        if config.workflow != AGENT:
            raise ConfigError(f"{env}: workflow is {config.workflow!r}, and env-check plays what the key env names")
        rows = replace(config.train_dataset, max_samples=size, shuffle=False)
        return config.workflow_kwargs, [*load_rows(rows)]
    values: dict[str, Any] = {"env": env}
    fill(values, where="env-check")
    if "train_dataset" not in values:
        raise ConfigError(f"env {env} plays rows of yours: give a CONFIG.yaml with env and train_dataset")
    rows = DatasetConfig(path=values["train_dataset"]["path"], kwargs={"size": size, "seed": 0})
    return values["workflow_kwargs"], [*load_rows(rows)]


class Report(NamedTuple):
    """Defects, and by the name of a check why it does not apply or could not run."""

    env: str
    defects: list[dict[str, str]]
    skipped: dict[str, str]
    not_run: dict[str, str]

    def lines(self) -> Iterator[str]:
        yield from ("{check}: {problem}\n  fix: {fix}".format_map(defect) for defect in self.defects)
        yield from (f"not run: {name}: {reason}" for name, reason in self.not_run.items())
        yield from (f"skipped: {name}: {reason}" for name, reason in self.skipped.items())
        found = f"{len(self.defects)} defect{'s' * (len(self.defects) > 1)}"
        yield f"{found if self.defects else 'not all checked' if self.not_run else 'sound'}: {self.env}"


async def check(subject: Subject, checks: Sequence[Check] = CHECKS) -> Report:
    """Run the checks, up to the first if no episode can begin."""
    report = Report(subject.env, [], {}, {})
    for each in checks:
        try:
            await each(subject)
        except Defect as defect:
            report.defects.append(dict(zip(("check", "problem", "fix"), defect.args, strict=True)))
        except Skipped as reason:
            report.skipped[each.__name__] = str(reason)
        except Exception as error:  # of the environment, outside of step
            report.not_run[each.__name__] = f"{type(error).__name__}: {error}"
        if not subject.plays:
            break
    return report


async def signal(subject: Subject) -> None:
    """Check that in some steps of the config's model, without training, a group has rewards that differ."""
    from areal_lite.runs.entry_points import run_rollout

    assert subject.config is not None
    rollout, rows = subject.config.rollout, subject.config.train_dataset
    rows = replace(rows, max_samples=_STEPS * rollout.consumer_batch_size)
    with TemporaryDirectory(prefix="areal-lite-env-check-") as folder:
        rollout = replace(rollout, fileroot=folder, dump_to_file=False)
        small = replace(subject.config, fileroot=folder, rollout=rollout, train_dataset=rows)
        groups = await asyncio.to_thread(run_rollout, small)
    if not any(len(set(group.rewards)) > 1 for group in groups):
        seen = sorted({reward for group in groups for reward in group.rewards})[:3]
        text = f"no group of {len(groups)} has rewards that differ: they are {', '.join(map(str, seen))}"
        raise Defect("signal", text, "make the task easier, reward parts of a solution, or train with SFT first")
