"""What a person sees while a run trains: a live line on a terminal, one line a step elsewhere.

Under torchrun the first rank speaks for all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

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

from areal_lite.launch.evaluation import Evaluation
from areal_lite.launch.run import TrainingSummary

_ROWS = ("held-out reward", "held-out episodes", "of them failed")


class TrainingProgress:
    """A context manager whose :meth:`on_step` is the callback of ``run_training``."""

    def __init__(self, total_steps: int, *, console: Console | None = None) -> None:
        self.console = console or Console(quiet=os.environ.get("RANK", "0") != "0")
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
        self._task = self._bar.add_task(
            "train",
            total=total_steps,
            reward="-",
            held_out="-",
            visible=False,  # a run that is resumed does not begin at 0
        )

    def __enter__(self) -> Self:
        self.console.print("starting ...")
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
            shown: dict[str, Any] = {"held_out": f"{reward:.3f}"}
        else:
            self.console.print(
                f"step {step:>4}  reward {metrics['train/reward_mean']:.3f}  loss {metrics['train/loss']:+.4f}  "
                f"{metrics['timing/step_s']:.1f} s (rollout {metrics['timing/rollout_wait_s']:.1f}, "
                f"weights {metrics['timing/weight_update_s']:.1f})"
            )
            shown = {"reward": f"{metrics['train/reward_mean']:.3f}"}
        self._bar.update(self._task, completed=step, visible=True, **shown)


def summary_table(summary: TrainingSummary) -> Table | str:
    """Return the before and after of a training run as a table, or one line where nothing was held out."""
    title = f"{summary.steps} training steps in {summary.seconds:.0f} s"
    if summary.after is None:
        return title
    table = Table("", "before", "after", title=title)
    for name, *values in zip(_ROWS, _column(summary.before), _column(summary.after), strict=True):
        table.add_row(name, *values)
    return table


def _column(found: Evaluation | None) -> list[str]:
    if found is None:
        return ["-"] * len(_ROWS)
    return [f"{found.reward:.3f}", str(found.episodes), str(found.failed)]
