"""The metrics of one or several runs as a picture, drawn from their metrics.jsonl.

A run may still be going. Panels that no run has data for are left out. The names are those of docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lite.errors import ConfigError
from areal_lite.inspect.jsonl import read_records

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    unit: str
    """Label of the y axis."""
    curves: Mapping[str, str]
    """Metric name -> label."""


PANELS = (
    Panel("Reward", "reward", {"train/reward_mean": "train", "eval/reward": "eval"}),
    Panel("Loss", "loss", {"train/loss": "train", "eval/loss": "eval"}),
    Panel(
        "Response length",
        "tokens",
        {"train/response_length_mean": "mean", "train/response_length_max": "longest"},
    ),
    Panel(
        "KL divergence",
        "nats per token",
        {"train/kl": "from the reference", "train/approx_kl": "within the step"},
    ),
    Panel(
        "Staleness",
        "policy versions",
        {"train/staleness_mean": "mean", "train/staleness_max": "largest"},
    ),
    Panel("Throughput of the trainer", "tokens per second", {"train/tokens_per_second": "train"}),
)
PHASES = ("timing/", "train/seconds_")
"""Prefixes of the metrics that are stacked as a step's seconds by phase."""
_TOTALS = ("timing/step_s", "train/seconds_step")
_LINES = ("-", "--")


def plot_metrics(*run_dirs: str | Path, out: str | Path | None = None) -> Path:
    """Draw :func:`metrics_figure` into the file ``out`` and return its path.

    Args:
        run_dirs: Folders with a metrics.jsonl.
        out: The picture; its suffix chooses the format. None: ``metrics.png`` in the folder of the one run.

    Raises:
        ConfigError: If there is nothing to draw or to draw with, or ``out`` cannot be written.
    """
    if out is None:
        if len(run_dirs) != 1:
            raise ConfigError(
                f"the picture of {len(run_dirs)} runs belongs to none of them: say where with --out FILE.png"
            )
        out = Path(run_dirs[0]) / "metrics.png"
    figure = metrics_figure(*run_dirs)
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a suffix that names no format
        raise ConfigError(
            f"{out} cannot be written: {error}: give a .png file in a folder that exists"
        ) from error
    return Path(out)


def metrics_figure(*run_dirs: str | Path) -> Any:
    """Return a matplotlib figure with one panel per kind of metric, the runs laid over one another.

    Seconds by phase are stacked, so each run has a panel of its own for them.

    Raises:
        ConfigError: If matplotlib is not installed, a metrics.jsonl is missing or broken, or none has data.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"plots need {error.name}, which is not installed: pip install {error.name}"
        ) from None
    runs: dict[str, Records] = {
        "/".join(Path(folder).resolve().parts[-2:]): list(read_records(Path(folder) / "metrics.jsonl"))
        for folder in run_dirs
    }
    panels = [
        panel for panel in PANELS if any(_points(r, name) for r in runs.values() for name in panel.curves)
    ]
    stacks = {run: phases for run, records in runs.items() if (phases := _phases(records))}
    count = len(panels) + len(stacks)
    if not count:
        names = " or ".join(name for panel in PANELS[:2] for name in panel.curves)
        raise ConfigError(
            f"metrics.jsonl of {', '.join(runs)}: no line has {names}: has the run made a step?"
        )
    columns = min(2, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(6 * columns, 3.2 * rows), layout="constrained")
    axes = iter([figure.add_subplot(rows, columns, place + 1) for place in range(count)])
    for panel in panels:
        _draw_panel(next(axes), panel, runs)
    for run, (steps, seconds) in stacks.items():
        own = next(axes)
        borders = [step - 0.5 for step in steps] + [steps[-1] + 0.5]  # one step has a width, too
        own.stackplot(borders, *([*s, s[-1]] for s in seconds.values()), labels=list(seconds), step="post")
        own.set(title="Time of a step" if len(runs) == 1 else f"Time of a step, {run}", ylabel="seconds")
        own.margins(y=0.5)  # room for the legend
    for own in figure.axes:
        own.set_xlabel("training step")
        own.xaxis.set_major_locator(MaxNLocator(integer=True))
        own.grid(alpha=0.3)
        own.legend(fontsize="small", ncols=3 if own.collections else 1)
    figure.suptitle(", ".join(runs))
    return figure


def _draw_panel(axes: Any, panel: Panel, runs: Mapping[str, Records]) -> None:
    axes.set(title=panel.title, ylabel=panel.unit)
    for color, (run, records) in enumerate(runs.items()):
        for number, (name, label) in enumerate(panel.curves.items()):
            if points := _points(records, name):
                axes.plot(
                    *zip(*points, strict=True),
                    label=label if len(runs) == 1 else f"{run}: {label}",
                    color=f"C{number if len(runs) == 1 else color}",
                    linestyle=_LINES[number],
                    marker="o" if name.startswith("eval/") else ".",
                    markersize=4,
                    linewidth=1,
                )


def _points(records: Records, name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def _phases(records: Records) -> tuple[list[int], dict[str, list[float]]] | None:
    """Return the steps and, for each phase that took any time, its seconds at these steps."""
    names = {name: None for record in records for name in record if name.startswith(PHASES)}
    timed = [record for record in records if not names.keys().isdisjoint(record)]
    seconds = {
        _phase(name): column
        for name in names
        if name not in _TOTALS and any(column := [record.get(name) or 0.0 for record in timed])
    }
    return ([record["step"] for record in timed], seconds) if seconds else None


def _phase(name: str) -> str:
    return name.removeprefix(PHASES[0]).removeprefix(PHASES[1]).removesuffix("_s").replace("_", " ")
