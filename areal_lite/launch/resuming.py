"""The checkpoint a run goes on from, found and checked before anything expensive starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_lite.api.config import RunConfig
from areal_lite.api.config_loader import dump_config
from areal_lite.api.supervised_config import SupervisedConfig
from areal_lite.errors import ConfigError
from areal_lite.launch.run_directory import run_directory_path

_Config = RunConfig | SupervisedConfig

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""


def checkpoint_to_resume(config: _Config, total_steps: int) -> tuple[Path | None, int]:
    """Return the checkpoint the run goes on from, None for a fresh start, and the step it stands at.

    Raises:
        CheckpointError: If it is missing or broken.
        ConfigError: If it is of another config, or nothing is left to train, evaluate or save.
    """
    from areal_lite.trainer.checkpoint import check_config, checkpoint_step, find_checkpoint

    run_dir = run_directory_path(config)
    checkpoint = find_checkpoint(run_dir / CHECKPOINTS, config.checkpoint.resume)
    if checkpoint is None:
        return None, 0
    check_config(checkpoint, dump_config(config))
    step = checkpoint_step(checkpoint)
    if step > total_steps or (step == total_steps and _is_complete(config, run_dir, step)):
        raise ConfigError(
            f"{checkpoint} has trained {step} steps and trainer.total_steps is {total_steps}: raise it to go on, or "
            "choose another trial_name"
        )
    return checkpoint, step


def way_back(run_dir: Path) -> str:
    """Return what a run that cannot go on can be taken up from."""
    from areal_lite.trainer.checkpoint import find_checkpoint

    last = find_checkpoint(run_dir / CHECKPOINTS, "auto")
    if last is None:
        return "there is no checkpoint to go on from: checkpoint.every_steps makes them"
    return f"the last good checkpoint is {last}"


def is_evaluated(run_dir: Path, step: int) -> bool:
    """Return whether metrics.jsonl has what the held-out rows gave at ``step``."""
    return any(name.startswith("eval/") for record in _records(run_dir, step) for name in record)


def _is_complete(config: _Config, run_dir: Path, step: int) -> bool:
    """Return whether the last step was evaluated and its model saved, where the run does that."""
    if config.eval_dataset is not None and not is_evaluated(run_dir, step):
        return False
    if not config.save_model:
        return True
    manifest = run_dir / "model" / "manifest.json"
    # A model older than the step's records is of a run that had fewer steps.
    trained_at = max((record["time"] for record in _records(run_dir, step)), default=0.0)
    return manifest.is_file() and manifest.stat().st_mtime >= trained_at


def _records(run_dir: Path, step: int) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    start = b'{"step": %d,' % step
    return [json.loads(line) for line in lines if line.startswith(start) and line.endswith(b"\n")]
