"""Plot the metrics.jsonl of one or several runs, or means over seeds; a run may still be in progress. Panels without
data are left out. Metric names are those of docs/metrics.md."""

import argparse
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any, TypeGuard
from areal_lite.errors import ConfigError
from areal_lite.files.whole_files import write_whole
from areal_lite.tools.foreign_files import read_records
from areal_lite.tools.sweep.seed_statistics import mean_interval

Records = Sequence[Mapping[str, Any]]
Panel = dict[str, Any]
"""A row of panels.toml: ``title``, ``unit``, and ``curves`` with the legend label of each metric."""
PANELS: list[Panel] = tomllib.loads((resources.files("areal_lite.tools.inspect") / "panels.toml").read_text())["panel"]
PHASES = ("timing/", "train/seconds_")
"""Prefixes of the metrics stacked as seconds of a step by phase."""
_TOTALS = ("timing/step_s", "train/seconds_step")
_LINES = ("-", "--")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a folder with a metrics.jsonl")
    add("--out", type=Path, metavar="FILE.png", help="image file (default for a single run: RUN_DIR/metrics.png)")


def run(options: argparse.Namespace) -> int:
    print(plot_metrics(*options.run_dirs, out=options.out))
    return 0


def plot_metrics(*run_dirs: str | Path, out: str | Path | None = None) -> Path:
    """Save :func:`metrics_figure` to ``out`` and return its path."""
    if out is None:
        if len(run_dirs) != 1:
            raise ConfigError(f"the plot of {len(run_dirs)} runs needs a file name: use --out FILE.png")
        out = Path(run_dirs[0]) / "metrics.png"
    return save_figure(metrics_figure(*run_dirs), out)


def metrics_figure(*run_dirs: str | Path) -> Any:
    """Return a matplotlib figure with one panel per kind of metric, all runs in the same panels, but with seconds by
    phase stacked in a panel for each run."""
    runs = {"/".join(Path(folder).resolve().parts[-2:]): [Path(folder)] for folder in run_dirs}
    return means_figure(runs, with_phases=True)


def means_figure(variants: Mapping[str, Sequence[Path]], *, level: float = 0.95, with_phases: bool = False) -> Any:
    """Return a matplotlib figure with the mean of each metric over the runs of a variant, and its interval."""
    runs = {name: [list(read_records(run / "metrics.jsonl")) for run in folders] for name, folders in variants.items()}
    metrics = [metric for panel in PANELS for metric in panel["curves"]]
    means = {(name, m): points for name in runs for m in metrics if (points := _means(runs[name], m, level))}
    panels = [panel for panel in PANELS if any(metric in panel["curves"] for _, metric in means)]
    stacks = {run: phases for run, (one, *_) in runs.items() if with_phases and (phases := _phases(one))}
    figure = _figure(len(panels) + len(stacks), runs)
    axes = iter(figure.axes)
    for panel in panels:
        _draw_panel(next(axes), panel, list(runs), means)
    for run, (steps, seconds) in stacks.items():
        plot = next(axes)
        borders = [step - 0.5 for step in steps] + [steps[-1] + 0.5]  # so that a single step has a width
        plot.stackplot(borders, *([*s, s[-1]] for s in seconds.values()), labels=list(seconds), step="post")
        plot.set(title="Step time" if len(runs) == 1 else f"Step time, {run}", ylabel="seconds")
        plot.margins(y=0.5)  # room for the legend
        plot.legend(fontsize="small", ncols=3)
    return figure


def _means(runs: Sequence[Records], metric: str, level: float) -> list[tuple[int, float, float, float]]:
    """Return step, mean and interval of the steps that all runs have; an interval of one run has no width."""
    columns = [dict(curve(records, metric)) for records in runs]
    points = []
    for step in sorted(set.intersection(*map(set, columns))):
        interval = mean_interval([column[step] for column in columns], level)
        edges = (interval.low, interval.high) if len(runs) > 1 else (interval.mean, interval.mean)
        points.append((step, interval.mean, *edges))
    return points


def _draw_panel(axes: Any, panel: Panel, names: Sequence[str], means: Mapping[tuple[str, str], Any]) -> None:
    axes.set(title=panel["title"], ylabel=panel["unit"])
    for place, name in enumerate(names):
        for number, (metric, label) in enumerate(panel["curves"].items()):
            if points := means.get((name, metric)):
                steps, middle, low, high = zip(*points, strict=True)
                color = f"C{number if len(names) == 1 else place}"
                shown = label if len(names) == 1 else f"{name}: {label}"
                marker = "o" if metric.startswith("eval/") else "."
                style = {"color": color, "marker": marker, "markersize": 4, "linewidth": 1}
                axes.plot(steps, middle, _LINES[number], label=shown, **style)
                axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    axes.legend(fontsize="small")


def _figure(count: int, names: Iterable[str]) -> Any:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise ConfigError(f"plots need {error.name}: pip install {error.name}") from None
    if not count:
        metrics = " or ".join(name for panel in PANELS[:2] for name in panel["curves"])
        raise ConfigError(f"metrics.jsonl of {', '.join(names)}: no line has {metrics}. Did the run do a step?")
    columns = min(2, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(6 * columns, 3.2 * rows), layout="constrained")
    for index in range(count):
        axes = figure.add_subplot(rows, columns, index + 1, xlabel="training step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.suptitle(", ".join(names))
    return figure


def save_figure(figure: Any, out: str | Path) -> Path:
    """Write a figure to ``out`` in the format of its suffix and return the path; raises ConfigError."""
    path, image = Path(out), BytesIO()
    try:
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent}")
        figure.savefig(image, dpi=150, format=path.suffix[1:] or "png")
        write_whole(path, image.getvalue())  # in place of a link, never through it
    except (OSError, ValueError) as error:  # ValueError: a suffix that names no format
        raise ConfigError(f"{out} cannot be written: {error}. Use a .png in an existing folder") from error
    return path


def curve(records: Records, name: str) -> list[tuple[int, float]]:
    return [(r["step"], r[name]) for r in records if is_number(r.get("step")) and is_number(r.get(name))]


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _phases(records: Records) -> tuple[list[int], dict[str, list[float]]] | None:
    names = {name: None for record in records for name in record if name.startswith(PHASES)}
    timed = [record for record in records if is_number(record.get("step")) and not names.keys().isdisjoint(record)]
    seconds = {
        phase(name): column
        for name in names
        if name not in _TOTALS and any(column := [v if is_number(v := record.get(name)) else 0.0 for record in timed])
    }
    return ([record["step"] for record in timed], seconds) if seconds else None


def phase(name: str) -> str:
    return name.removeprefix(PHASES[0]).removeprefix(PHASES[1]).removesuffix("_s").replace("_", " ")
