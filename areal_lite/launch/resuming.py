"""The checkpoint a run goes on from, found and checked before anything expensive starts."""

from __future__ import annotations

from pathlib import Path

from areal_lite.api.config import ExperimentConfig
from areal_lite.api.config_loader import dump_config
from areal_lite.errors import ConfigError
from areal_lite.launch.run_directory import run_directory_path

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""


def checkpoint_to_resume(config: ExperimentConfig, total_steps: int) -> tuple[Path | None, int]:
    """Return the checkpoint the run goes on from, None for a fresh start, and the step it stands at.

    Raises:
        CheckpointError: If it is missing or broken.
        ConfigError: If it is of another config, or there is nothing left to train.
    """
    from areal_lite.trainer.checkpoint import check_config, checkpoint_step, find_checkpoint

    checkpoint = find_checkpoint(run_directory_path(config) / CHECKPOINTS, config.checkpoint.resume)
    if checkpoint is None:
        return None, 0
    check_config(checkpoint, dump_config(config))
    step = checkpoint_step(checkpoint)
    if step >= total_steps:
        raise ConfigError(
            f"{checkpoint} has trained {step} steps and trainer.total_steps is {total_steps}: raise it to go on, or "
            "choose another trial_name"
        )
    return checkpoint, step
