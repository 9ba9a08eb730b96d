"""The learning curve of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from areal_lite.errors import ConfigError
from areal_lite.inspect.jsonl import read_records


def plot_metrics(run_dir: str | Path) -> Path:
    """Draw mean reward per step, with the held-out reward as points, into ``run_dir/reward.png``.

    Returns:
        The path of the picture.

    Raises:
        ConfigError: If matplotlib is not installed, or metrics.jsonl has neither curve.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"plots need {error.name}, which is not installed: pip install 'areal-lite[examples]'"
        ) from None
    source = Path(run_dir) / "metrics.jsonl"
    records = list(read_records(source))
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="training step", ylabel="reward")
    for key, label, style in (
        ("train/reward_mean", "training rows", {"linewidth": 1.2}),
        ("eval/reward", "held-out rows", {"marker": "o", "linestyle": "--"}),
    ):
        points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    if not axes.lines:
        raise ConfigError(f"{source}: no line has train/reward_mean or eval/reward: has the run made a step?")
    axes.legend()
    axes.grid(alpha=0.3)
    picture = source.with_name("reward.png")
    figure.savefig(picture, dpi=150)
    return picture
