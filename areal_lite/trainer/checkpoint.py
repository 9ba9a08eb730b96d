"""What a training run goes on from: one folder per step, whole or not there, and never passed over in silence.

A folder ``step_00000010`` holds what :mod:`areal_lite.trainer.snapshot` writes, whatever else the run puts there
(its config, where its data stands), and ``manifest.json`` with the hash of each file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.trainer.snapshot import Trainer, restore
from areal_lite.trainer.whole_folder import check_folder

CONFIG_FILE = "config.yaml"
"""The run's resolved config inside a checkpoint."""

_FOLDER = re.compile(r"step_(\d{8,})")
_FREE = {
    "total_steps",
    "epochs",
    "max_tokens_per_microbatch",
    "device",
    "num_threads",
    "gradient_checkpointing",
    "deterministic",
}
"""What may change in the trainer's section."""
_FREE_OF_ROWS = {"path", "cache_dir", "num_workers", "filter_overlong_prompts_workers"}
"""What may change of the rows, whose content is compared where they are drawn."""
_ROLLOUT = ("group_size", "consumer_batch_size", "gconfig")
_WHOLE_RUN = (
    "model_path",
    "seed",
    "workflow",
    "workflow_kwargs",
    "should_accept_fn",
    "data_packer",
    "reward_model",
)


def find_checkpoint(root: Path, resume: str) -> Path | None:
    """Return the checkpoint that ``resume`` (auto, never or a path) means, None for a fresh start.

    Raises:
        CheckpointError: If it is missing or not whole, or ``root`` holds later ones, which ``auto`` would go on from
            the next time. A broken newest one is never passed over.
        ConfigError: If it says never and ``root`` holds checkpoints, which nothing but their owner removes.
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
                f"checkpoint.resume {resume!r} is no folder: it must be auto, never, or a checkpoint; of this run "
                f"there are {there}"
            )
        _check(folder, "the checkpoint", "Name another one in checkpoint.resume")
        refuse_later(root, checkpoint_step(folder))
        return folder
    if not folders:
        return None
    earlier = f", to go on from {folders[-2].name}" if len(folders) > 1 else ""
    _check(folders[-1], "the newest checkpoint", f"Remove {folders[-1]}{earlier}, or set another trial_name")
    return folders[-1]


def load_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Give ``trainer`` the weights, optimizers, counters and random state of a checkpoint, bit for bit.

    Raises:
        CheckpointError: If the checkpoint is of another model, or of other parts of it.
    """
    restore(trainer, folder)


def check_config(folder: Path, config: str) -> None:
    """Refuse to go on with a config under which other weights would come out.

    How far the run goes, where it computes, what it saves and which servers it asks may change; what is trained, how
    and on how much may not.

    Args:
        folder: A checkpoint; one without a config is of a run that had none.
        config: The resolved YAML of the run that wants to go on.

    Raises:
        ConfigError: With every difference.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return
    then, now = (_decisive(yaml.safe_load(text)) for text in (path.read_text(), config))
    if differences := list(_differences(then, now)):
        raise ConfigError(
            f"{folder} was made with another config: {'; '.join(differences)}. Put these back to go on, or start "
            "another trial_name"
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
    """Return the training steps done when the checkpoint was written, which is the policy version as well.

    Raises:
        CheckpointError: If the folder is something else.
    """
    try:
        return int(json.loads((folder / "trainer.json").read_bytes())["step"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds weights without trainer.json: to go on, name a checkpoint; to train these weights in "
            "another run, set model_path"
        ) from None


def refuse_later(root: Path, step: int) -> None:
    """Refuse to have two histories in one folder.

    Raises:
        CheckpointError: If ``root`` holds checkpoints of steps after ``step``.
    """
    later = [path.name for path in checkpoints(root) if _number(path) > step]
    if later:
        raise CheckpointError(
            f"{root} holds {', '.join(later)}, later than step {step}: a run that goes on from there would leave two "
            "histories, and the next start would take the wrong one. Set checkpoint.resume=auto to go on from the "
            "newest, remove or move the later ones, or set another trial_name"
        )


def _check(folder: Path, name: str, mend: str) -> None:
    try:
        check_folder(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{name} cannot be used: {error}. {mend}") from error


def _decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that may not change, by dotted name."""
    trainer, rollout = config.get("trainer", {}), config.get("rollout", {})
    rows = config.get("train_dataset", {})
    return {
        **{name: config[name] for name in _WHOLE_RUN if name in config},
        **{f"trainer.{name}": value for name, value in trainer.items() if name not in _FREE},
        **{f"rollout.{name}": rollout[name] for name in _ROLLOUT if name in rollout},
        **{f"train_dataset.{name}": value for name, value in rows.items() if name not in _FREE_OF_ROWS},
    }


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield what differs of the fields that both have.

    A field that one of them lacks was added or removed since, and the default is what happened without it.
    """
    for name in sorted(then.keys() & now.keys()):
        before, after, path = then[name], now[name], section + name
        if isinstance(before, dict) and isinstance(after, dict) and not name.endswith("kwargs"):
            yield from _differences(before, after, f"{path}.")
        elif before != after:
            yield f"{path} was {before!r} and is {after!r}"


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
