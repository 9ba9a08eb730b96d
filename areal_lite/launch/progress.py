"""What a person sees while a run trains: a live line on a terminal, one line a step elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from areal_lite.launch.run import TrainingSummary


class TrainingProgress:
    """A context manager whose :meth:`on_step` is the callback of ``run_training``."""

    def __init__(self, total_steps: int, *, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}  held-out {task.fields[held_out]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total_steps, reward="-", held_out="-")

    def __enter__(self) -> Self:
        self.console.print("loading the model and starting the server ...")
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one record of metrics.jsonl."""
        if "eval/reward" in metrics:
            reward = metrics["eval/reward"]
            self.console.print(
                f"step {step:>4}  held-out reward {reward:.3f} over {metrics['eval/episodes']:.0f} episodes "
                f"({metrics['eval/seconds']:.1f} s)"
            )
            self._bar.update(self._task, held_out=f"{reward:.3f}")
        else:
            self.console.print(
                f"step {step:>4}  reward {metrics['train/reward_mean']:.3f}  loss {metrics['train/loss']:+.4f}  "
                f"{metrics['timing/step_s']:.1f} s (rollout {metrics['timing/rollout_wait_s']:.1f}, "
                f"weights {metrics['timing/weight_update_s']:.1f})"
            )
            self._bar.update(self._task, completed=step, reward=f"{metrics['train/reward_mean']:.3f}")


def summary_table(summary: TrainingSummary) -> Table:
    """Return the before and after of a training run as a table."""
    table = Table("", "before", "after", title=f"{summary.steps} training steps in {summary.seconds:.0f} s")
    if summary.before is not None and summary.after is not None:
        table.add_row("held-out reward", f"{summary.before.reward:.3f}", f"{summary.after.reward:.3f}")
        table.add_row("held-out episodes", str(summary.before.episodes), str(summary.after.episodes))
        table.add_row("of them failed", str(summary.before.failed), str(summary.after.failed))
    return table
