"""Finds, checks and loads the checkpoint that a training run resumes from: one folder per step.

Guarantees that a damaged checkpoint is an error and never skipped silently. A folder ``step_00000010`` holds the files
of :mod:`areal_lite.trainer.snapshot`, further files of the run (its config, the state of its data source), and
``manifest.json`` with the hash of each file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.trainer.atomic_folder import check_folder
from areal_lite.trainer.snapshot import Trainer, restore

CONFIG_FILE = "config.yaml"
"""Name of the run's resolved config inside a checkpoint."""

_FOLDER = re.compile(r"step_(\d{8,})")
_MAY_CHANGE = {
    "total_steps",
    "epochs",
    "max_tokens_per_microbatch",
    "device",
    "num_threads",
    "gradient_checkpointing",
    "deterministic",
}
"""Keys of the trainer section that may change on resume."""
_DATASET_MAY_CHANGE = {"path", "cache_dir", "num_workers", "filter_overlong_prompts_workers"}
"""Keys of the dataset that may change; the data source compares the content of the rows itself."""
_ROLLOUT_FIXED = ("group_size", "consumer_batch_size", "gconfig")
_TOP_LEVEL_FIXED = (
    "model_path",
    "seed",
    "workflow",
    "workflow_kwargs",
    "should_accept_fn",
    "data_packer",
    "reward_model",
)


def find_checkpoint(root: Path, resume: str) -> Path | None:
    """Return the checkpoint that ``resume`` (auto, never or a path) selects; None for a fresh start.

    Raises:
        CheckpointError: If it is missing or damaged (the newest is never skipped), or ``root`` holds later ones,
            which ``auto`` would resume from the next time.
        ConfigError: If ``resume`` is never and ``root`` holds checkpoints.
    """
    folders = checkpoints(root)
    if resume == "never":
        if folders:
            raise ConfigError(
                f"checkpoint.resume is never, and {root} already holds a training run: choose another trial_name, or "
                "remove the folder"
            )
        return None
    if resume != "auto":
        folder = Path(resume)
        if not folder.is_dir():
            there = ", ".join(str(one) for one in folders) or "none"
            raise ConfigError(
                f"checkpoint.resume {resume!r} is not a folder: it must be auto, never, or a checkpoint; this run has "
                f"{there}"
            )
        _check(folder, "the checkpoint", "Name another one in checkpoint.resume")
        refuse_later(root, checkpoint_step(folder))
        return folder
    if not folders:
        return None
    earlier = f" to resume from {folders[-2].name}" if len(folders) > 1 else ""
    _check(folders[-1], "the newest checkpoint", f"Remove {folders[-1]}{earlier}, or set another trial_name")
    return folders[-1]


def load_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Restore the weights, optimizers, counters and random state of ``trainer`` from a checkpoint, bit for bit.

    Raises:
        CheckpointError: If the checkpoint belongs to another model, or to other parts of it.
    """
    restore(trainer, folder)


def check_config(folder: Path, config: str) -> None:
    """Refuse to resume with a config that would train different weights.

    The length of the run, its devices, what it saves and its servers may change; the model, the algorithm, the data
    and the batch sizes may not.

    Args:
        folder: A checkpoint; one without a config is accepted.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return
    then, now = (_fixed_values(yaml.safe_load(text)) for text in (path.read_text(), config))
    if differences := list(_differences(then, now)):
        raise ConfigError(
            f"{folder} was made with another config: {'; '.join(differences)}. Restore these values to resume, or "
            "start another trial_name"
        )


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints below ``root``, oldest first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _FOLDER.fullmatch(path.name)), key=_number)


def checkpoint_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step`` steps."""
    return root / f"step_{step:08d}"


def checkpoint_step(folder: Path) -> int:
    """Return the number of training steps done when the checkpoint was written, also its policy version.

    Raises:
        CheckpointError: If the folder is not a checkpoint.
    """
    try:
        return int(json.loads((folder / "trainer.json").read_bytes())["step"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds weights without trainer.json: to resume, name a checkpoint; to train these weights in "
            "another run, set model_path"
        ) from None


def refuse_later(root: Path, step: int) -> None:
    """Refuse to write a second history into one folder.

    Raises:
        CheckpointError: If ``root`` holds checkpoints of steps after ``step``.
    """
    later = [path.name for path in checkpoints(root) if _number(path) > step]
    if later:
        raise CheckpointError(
            f"{root} holds {', '.join(later)}, later than step {step}: a run that resumes from there would leave two "
            "histories, and the next start would take the wrong one. Set checkpoint.resume=auto to resume from the "
            "newest, remove or move the later ones, or set another trial_name"
        )


def _check(folder: Path, name: str, hint: str) -> None:
    try:
        check_folder(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{name} cannot be used: {error}. {hint}") from error


def _fixed_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that may not change, by dotted name."""
    trainer, rollout = config.get("trainer", {}), config.get("rollout", {})
    dataset = config.get("train_dataset", {})
    return {
        **{name: config[name] for name in _TOP_LEVEL_FIXED if name in config},
        **{f"trainer.{name}": value for name, value in trainer.items() if name not in _MAY_CHANGE},
        **{f"rollout.{name}": rollout[name] for name in _ROLLOUT_FIXED if name in rollout},
        **{
            f"train_dataset.{name}": value
            for name, value in dataset.items()
            if name not in _DATASET_MAY_CHANGE
        },
    }


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield the differences of the fields that both have.

    A field that one of them lacks was added or removed since; its default is the behaviour without it.
    """
    for name in sorted(then.keys() & now.keys()):
        before, after, path = then[name], now[name], section + name
        if isinstance(before, dict) and isinstance(after, dict) and not name.endswith("kwargs"):
            yield from _differences(before, after, f"{path}.")
        elif before != after:
            yield f"{path} was {before!r} and is {after!r}"


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
