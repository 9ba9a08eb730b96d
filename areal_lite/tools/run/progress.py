"""Console output of training, of the first rank only: a progress bar on a terminal, one line per record elsewhere."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from areal_lite.processes.quick_import import is_first_rank
from areal_lite.runs.evaluation import Evaluation
from areal_lite.tools.inspect.episode_text import stdout_console

if TYPE_CHECKING:
    from areal_lite.runs.training_run import Summary

_ROWS = (
    ("held-out reward", "reward", ".3f"),
    ("held-out episodes", "episodes", "d"),
    ("of them failed", "failed", "d"),
)


class TrainingProgress:
    """A context manager whose :meth:`on_step` is the callback of ``run_training``."""

    def __init__(self, total_steps: int | None, *, console: Console | None = None) -> None:
        self.console = console or stdout_console(quiet=not is_first_rank())
        self.last: dict[str, float] = {}
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rewards]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        # A resumed run does not start at 0.
        self._task = self._bar.add_task("train", total=total_steps, rewards="", visible=False)
        self._rewards: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one record of metrics.jsonl, of any kind of run."""
        self.last = {**self.last, **metrics}
        self.console.print(progress_line(step, metrics))
        for name, metric in (("reward", "train/reward_mean"), ("held-out", "eval/reward")):
            if metric in metrics:
                self._rewards[name] = f"{name} {metrics[metric]:.3f}"
        total, rewards = getattr(metrics, "total_steps", None), "  ".join(self._rewards.values())
        self._bar.update(self._task, total=total, completed=step, visible=True, rewards=rewards)


def _trouble(metrics: Mapping[str, float]) -> str:
    """Return failed episodes with the top cause, retried requests and live nodes of a cluster; empty without any."""
    text, cause = "", getattr(metrics, "top_cause", "")
    if failed := metrics.get("rollout/failed_episodes"):
        text += f"  failed {failed:.0f}{f' (most: {cause})' if cause else ''}"
    if retried := metrics.get("rollout/retried_requests"):
        text += f"  retried {retried:.0f}"
    if nodes := metrics.get("cluster/nodes"):
        text += f"  nodes {nodes:.0f}"
    return text


def server_table(metrics: Mapping[str, float], addresses: Sequence[str], started: str | None = None) -> Table | None:
    """Return the figures of each server in a run's last record, None without; ``started`` is the backend of its own."""
    figures: dict[str, dict[str, float]] = {}
    for metric, value in metrics.items():
        if metric.startswith("servers/"):
            _, index, key = metric.split("/")
            figures.setdefault(index, {})[key] = value
    if not figures:
        return None
    columns = [key for key in figures["0"] if key != "outstanding"]  # nothing is at the end
    named = len(addresses) == len(figures) - ("router" in figures)
    headings = (Column(key.removeprefix("latency_").replace("_", " "), justify="right") for key in columns)
    table = Table(Column("server", no_wrap=True), *headings, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, server in figures.items():
        name = addresses[int(index)] if named and index != "router" else index if addresses else started or "embedded"
        table.add_row(name, *(f"{server[c]:.2f}" if c.endswith("_s") else f"{server[c]:.0f}" for c in columns))
    return table


def summary_table(summary: "Summary[Evaluation]") -> Table | str:
    """Return the evaluations before and after a training run as a table, or one line if there are none."""
    title = f"{summary.steps} training steps in {summary.seconds:.0f} s"
    if summary.after is None:
        return title
    table = Table("", "before", "after", title=title)
    for name, field, form in _ROWS:
        both = (summary.before, summary.after)
        table.add_row(name, *("-" if one is None else format(getattr(one, field), form) for one in both))
    return table


def progress_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return the line of one record."""
    if "eval/reward" in metrics:
        took = f"over {metrics['eval/episodes']:.0f} episodes ({metrics['eval/seconds']:.1f} s)"
        return f"step {step:>4}  held-out reward {metrics['eval/reward']:.3f} {took}"
    if "train/reward_mean" in metrics:
        return (
            f"step {step:>4}  reward {metrics['train/reward_mean']:.3f}  loss {metrics['train/loss']:+.4f}  "
            f"{metrics['timing/step_s']:.1f} s (rollout {metrics['timing/rollout_wait_s']:.1f}, "
            f"weights {metrics['timing/weight_update_s']:.1f}){_trouble(metrics)}"
        )
    scope = "eval" if "eval/loss" in metrics else "train"
    formats = {"loss": ".4f", "accuracy": ".3f", "margin": "+.3f", "learning_rate": ".2e", "grad_norm": ".2f"}
    formats["tokens_per_second"] = ".0f"
    values = [
        f"{name.replace('_', ' ')} {metrics[f'{scope}/{name}']:{form}}"
        for name, form in formats.items()
        if f"{scope}/{name}" in metrics
    ]
    return f"step {step:>5}  {'held-out ' * (scope == 'eval')}{'  '.join(values)}"
