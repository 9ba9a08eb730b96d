"""`make demo`: train a language model by RL on this machine and show the result.

Trains SmolLM2-135M with configs/demo.yaml and the agent in workflows/largest_number.py.
"""

from __future__ import annotations
import os
import sys
import time
from pathlib import Path

# Server and trainer take turns here, so their threads may spin a little; endlessly, they would slow each other down.
# Set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
sys.path.insert(0, str(Path.cwd()))

from smollm2 import smollm2
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_training
from areal_lite.tools.inspect.plot import plot_metrics
from areal_lite.tools.run.progress import TrainingProgress, summary_table


def main() -> None:
    """Train, then print the accuracy before and after, the plot, the dump and the next command."""
    print("starting ...", flush=True)
    smollm2()
    trial = time.strftime("%Y%m%d-%H%M%S")
    config = load_config("configs/demo.yaml", [f"trial_name={trial}", *sys.argv[1:]])
    with TrainingProgress(config.trainer.total_steps) as progress:
        summary = run_training(config, on_step=progress.on_step)
    progress.console.print(summary_table(summary))
    print(f"curves: {plot_metrics(summary.run_dir)}")
    assert summary.before is not None and summary.after is not None
    before, after = summary.before.reward, summary.after.reward
    print(f"held-out accuracy: {before:.2f} -> {after:.2f} ({summary.seconds:.0f} s)")
    print(f"trajectories: {summary.run_dir / 'rollout'}")
    print(f"next: .venv/bin/areal-lite view {summary.run_dir}")


if __name__ == "__main__":
    main()
