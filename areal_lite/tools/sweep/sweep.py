"""areal-lite sweep: the runs of one or several variants of a config over seeds, and what they show.

Runs follow one another in this process, each in a trial folder of its own. A finished run leaves ``finished.yaml`` and
is not made again; a stopped one resumes from its checkpoint, so the same command continues a sweep.
"""

import argparse
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from rich.table import Column, Table
from areal_lite.config.dump import dump_config
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.errors import ArealLiteError, ConfigError
from areal_lite.files.whole_files import write_whole
from areal_lite.tools.argument_types import positive_integer
from areal_lite.tools.foreign_files import read_records
from areal_lite.tools.inspect.episode_text import stdout_console
from areal_lite.tools.inspect.plot import means_figure, save_figure
from areal_lite.tools.run.train import train
from areal_lite.tools.sweep.seed_statistics import Interval, Verdict, compare_pairs, mean_interval

FINISHED = "finished.yaml"
"""The config that a run of a sweep finished with."""
_DEFAULT_METRICS = ("eval/reward", "train/reward_mean", "eval/loss", "train/loss")
_LOWER_IS_BETTER = ("loss", "_s", "seconds")
_LAST_PART = re.compile(r"^[^=]*\.(?=[^.=]*=)")
"""Matches all of an override before the last part of its key."""


class Variant(NamedTuple):
    name: str
    configs: list[ExperimentConfig]
    commands: list[list[str]]
    """The command of each."""

    @property
    def run_dirs(self) -> list[Path]:
        return [config.run_dir for config in self.configs]


class Result(NamedTuple):
    variant: Variant
    scores: list[float]
    interval: Interval
    verdict: Verdict | None
    """Against the first variant, which has none."""
    difference: Interval | None
    """This variant minus the first, paired by seed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", metavar="CONFIG.yaml | key=v1,v2", nargs="+", help="one or more configs, and values for all of them")
    add("--seeds", type=positive_integer, required=True, metavar="N", help="runs of each variant")
    add("--metric", metavar="NAME", help="what is compared (default: eval/reward, else train/reward_mean, else a loss)")
    add("--level", type=_fraction, default=0.95, metavar="P", help="level of the intervals (default: 0.95)")
    add("--out", type=Path, metavar="FILE.png", help="image file (default: sweep.png in the experiment's folder)")
    parser.set_defaults(root=RunConfig)


def run(options: argparse.Namespace) -> int:
    overrides = [word for word in options.words if "=" in word]
    variants = variants_of([word for word in options.words if "=" not in word], overrides, seeds=options.seeds)
    run_sweep(variants, _make_run)
    metric, results = results_of(variants, metric=options.metric, level=options.level)
    stdout_console().print(sweep_table(metric, results, level=options.level))
    first, *others = results
    for other in others:
        names = f"{other.variant.name} against {first.variant.name}"
        print(f"{names}: {other.verdict}; difference {other.difference} over {len(other.scores)} pairs of seeds")
    folder = variants[0].run_dirs[0].parent
    try:
        figure = means_figure({variant.name: variant.run_dirs for variant in variants}, level=options.level)
        print(f"curves: {save_figure(figure, options.out or folder / 'sweep.png')}")
    except ConfigError as error:
        print(f"no curves: {error}")
    print(f"next: areal-lite view {folder}")
    return 0


def _make_run(config: Any, title: str) -> None:
    print(title, flush=True)
    train(config)


def _fraction(text: str) -> float:
    if not 0 < (number := float(text)) < 1:
        raise ValueError
    return number


def variants_of(paths: Sequence[str], overrides: Sequence[str], *, seeds: int) -> list[Variant]:
    """Return a variant for each config and each combination of the overrides' values.

    Args:
        paths: YAML files.
        overrides: ``key=value`` for all runs, or ``key=v1,v2`` for a variant per value. Commas inside of brackets,
            braces and quotes do not separate values.
        seeds: Runs per variant, with the seeds ``seed``, ``seed + 1`` and so on.

    Raises:
        ConfigError: If there is no config or a wrong one, or two runs would share a folder.
    """
    if not paths:
        raise ConfigError("a sweep needs a config: areal-lite sweep CONFIG.yaml --seeds N")
    pairs = [override.partition("=") for override in overrides]
    values = [[f"{key}={value}" for value in _split(text)] for key, _, text in pairs]
    variants = []
    for path in paths:
        for chosen in itertools.product(*values):
            parts = [Path(path).stem] if len(paths) > 1 else []
            parts += [_LAST_PART.sub("", one) for one, all_ in zip(chosen, values, strict=True) if len(all_) > 1]
            base = load_config(path, chosen, root=ExperimentConfig)
            first = 1 if base.seed is None else base.seed
            trial = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([base.trial_name, *parts]))
            runs = [[*chosen, f"seed={seed}", f"trial_name={trial}-seed{seed}"] for seed in range(first, first + seeds)]
            configs = [load_config(path, words, root=ExperimentConfig) for words in runs]
            commands = [[str(getattr(base, "kind", "train")).replace("_", "-"), str(path), *words] for words in runs]
            variants.append(Variant(" ".join(parts) or base.experiment_name, configs, commands))
    folders = [folder for variant in variants for folder in variant.run_dirs]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise ConfigError(f"two runs of the sweep would write to {twice}: give the configs other file names")
    return variants


def run_sweep(variants: Sequence[Variant], make_run: Callable[[ExperimentConfig, str], object]) -> None:
    """Make the runs that are not finished, seed by seed."""
    pairs = [zip(variant.configs, variant.commands, strict=True) for variant in variants]
    runs = [run for of_seed in zip(*pairs, strict=True) for run in of_seed]
    todo = [run for run in runs if not _is_finished(run[0])]
    if todo and todo[0][0].launch == "ray":
        from areal_lite.tools.run.on_nodes import run_side_by_side

        return run_side_by_side([run[0] for run in todo], [run[1] for run in todo], _mark_finished)
    for number, (config, _) in enumerate(todo, len(runs) - len(todo) + 1):
        try:
            make_run(config, f"run {number} of {len(runs)}: {config.run_dir}")
        except ArealLiteError as error:
            error.add_note(f"{number - 1} of {len(runs)} runs of the sweep are finished; the same command continues it")
            raise
        _mark_finished(config)


def _mark_finished(config: ExperimentConfig) -> None:
    write_whole(config.run_dir / FINISHED, dump_config(config).encode())


def results_of(
    variants: Sequence[Variant], *, metric: str | None = None, level: float = 0.95
) -> tuple[str, list[Result]]:
    """Return the metric and the results of the variants, each compared with the first.

    A held-out metric counts at its last evaluation, others as the mean over the last tenth of the steps. For losses
    and times lower is better.

    Args:
        metric: A name of metrics.jsonl. None: the held-out reward, else the training reward, or the loss.
        level: Confidence level of all intervals.

    Raises:
        ConfigError: If a run lacks the metric.
    """
    records = [[list(read_records(folder / "metrics.jsonl")) for folder in variant.run_dirs] for variant in variants]
    if metric is None:
        every = [run for of_variant in records for run in of_variant]
        metric = next((m for m in _DEFAULT_METRICS if all(_values(run, m) for run in every)), _DEFAULT_METRICS[0])
    lower = metric.endswith(_LOWER_IS_BETTER) or metric.startswith(("train/seconds_", "train/ms_per_token_"))
    results: list[Result] = []
    for variant, runs in zip(variants, records, strict=True):
        scores = [_score(run, metric, folder) for run, folder in zip(runs, variant.run_dirs, strict=True)]
        verdict, difference = None, None
        if results:
            verdict, difference = compare_pairs(results[0].scores, scores, level=level, lower_is_better=lower)
        results.append(Result(variant, scores, mean_interval(scores, level), verdict, difference))
    return metric, results


def _is_finished(config: ExperimentConfig) -> bool:
    file = config.run_dir / FINISHED
    if not file.exists():
        return False
    then, now = (text.splitlines() for text in (file.read_text(), dump_config(config)))
    if then != now:
        was = "; ".join(sorted(line.strip() for line in {*then} ^ {*now})) or "the same values at other keys"
        raise ConfigError(
            f"{config.run_dir} holds a finished run of another config ({was}): choose another trial_name, or remove "
            "the folder"
        )
    return True


def _values(records: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    return [record[metric] for record in records if record.get(metric) is not None]


def _score(records: Sequence[Mapping[str, Any]], metric: str, run_dir: Path) -> float:
    if not (values := _values(records, metric)):
        raise ConfigError(
            f"{run_dir}/metrics.jsonl has no {metric}: set --metric to one of docs/metrics.md that it has"
        )
    last = values[-1:] if metric.startswith("eval/") else values[-math.ceil(len(values) / 10) :]
    return sum(last) / len(last)


def _split(text: str) -> list[str]:
    """Return the parts between the commas outside of brackets, braces and quotes."""
    parts = re.findall(r"""(?:[^,\[\]{}"']|\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*')+""", text)
    return parts if ",".join(parts) == text else [text]  # an apostrophe, or brackets in brackets: one value


def sweep_table(metric: str, results: Sequence[Result], *, level: float) -> Table:
    columns = [Column(name, overflow="fold") for name in ("variant", "mean and interval", "each seed")]
    table = Table(*columns, title=f"{metric}, {level:.0%} interval")
    for result in results:
        table.add_row(result.variant.name, str(result.interval), " ".join(f"{score:.4g}" for score in result.scores))
    return table
