"""`areal-lite train` from Python: load a YAML, override values, train, look at the result.

OMP_WAIT_POLICY=PASSIVE python examples/03_train_from_yaml.py [MODEL_FOLDER] [key=value ...]

PASSIVE lets idle threads of the trainer and the server sleep, not spin; `areal-lite` sets it by itself.
"""

from __future__ import annotations
import sys
import time
from pathlib import Path
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_training


def show(step: int, metrics: dict[str, float]) -> None:
    """Print some metrics; step 0 is the evaluation before training."""
    for name in ("train/reward_mean", "train/grad_norm", "timing/step_s", "eval/reward"):
        if name in metrics:
            print(f"step {step}  {name} {metrics[name]:.3f}")


def main(model_path: str = "runs/models/SmolLM2-135M-Instruct", *overrides: str) -> None:
    config = load_config(
        "configs/demo.yaml",
        [
            f"model_path={model_path}",
            f"trial_name={time.strftime('%Y%m%d-%H%M%S')}",
            "experiment_name=train_from_yaml",
            "trainer.total_steps=2",
            "eval_dataset.kwargs.size=16",
            *overrides,
        ],
    )
    summary = run_training(config, on_step=show)
    assert summary.before is not None and summary.after is not None
    print(f"held-out reward {summary.before.reward:.2f} -> {summary.after.reward:.2f}")
    print(f"written to {summary.run_dir}, the model to {summary.model_dir}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))  # to import workflows.*; `areal-lite` does the same
    main(*sys.argv[1:])
