"""What a training run goes on from: one folder per step, whole or not there, read back before an older one goes.

A folder ``step_00000010`` holds ``model/`` (a Hugging Face folder in float32), ``optimizer.safetensors``,
``trainer.json``, whatever else the run puts there, and ``manifest.json`` with the hash of each file.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from areal_lite.errors import CheckpointError
from areal_lite.trainer.policy_model import load_policy
from areal_lite.trainer.policy_trainer import PolicyTrainer
from areal_lite.trainer.weights import check_folder, write_folder, write_model

_FOLDER = re.compile(r"step_(\d{8,})")


def save_checkpoint(
    trainer: PolicyTrainer, root: Path, step: int, *, write_rest: Callable[[Path], None], keep: int
) -> Path:
    """Write ``root/step_{step:08d}`` and return it; the newest ``keep`` checkpoints stay.

    Args:
        trainer: Its weights, optimizer and counters are saved.
        root: Folder of the run's checkpoints.
        step: Training steps done, which is the policy version as well.
        write_rest: Writes what else belongs to the checkpoint into the folder it is given.
        keep: Older ones are removed once the new one has been read back.

    Raises:
        StorageError: If the disk is full or not writable; older checkpoints stay.
    """

    def write(aside: Path) -> None:
        write_model(trainer.model, aside / "model", torch.float32)
        state = trainer.optimizer.state_dict()["state"]
        tensors = {
            f"{index}.{name}": value for index, values in state.items() for name, value in values.items()
        }
        save_file(tensors, aside / "optimizer.safetensors")
        counters = {
            "step": step,
            "steps_done": trainer.steps_done,
            "skipped_in_a_row": trainer.skipped_in_a_row,
        }
        (aside / "trainer.json").write_text(json.dumps(counters) + "\n")
        write_rest(aside)

    folder = root / f"step_{step:08d}"
    write_folder(folder, write, version=step)
    check_folder(folder)
    for older in _folders(root)[:-keep]:
        shutil.rmtree(older, ignore_errors=True)
    return folder


def find_checkpoint(root: Path, resume: str) -> Path | None:
    """Return the checkpoint that ``resume`` (auto, never or a path) means, None for a fresh start.

    Raises:
        CheckpointError: If it is missing or not whole. A broken newest one is never passed over in silence.
    """
    if resume == "never":
        return None
    if resume != "auto":
        check_folder(Path(resume))
        return Path(resume)
    folders = _folders(root)
    if not folders:
        return None
    try:
        check_folder(folders[-1])
    except CheckpointError as error:
        earlier = f", to go on from {folders[-2].name}" if len(folders) > 1 else ""
        raise CheckpointError(
            f"the newest checkpoint cannot be used: {error}. Remove {folders[-1]}{earlier}, or set "
            "checkpoint.resume=never with another trial_name"
        ) from error
    return folders[-1]


def checkpoint_step(folder: Path) -> int:
    """Return the training steps done when the checkpoint was written."""
    return int(json.loads((folder / "trainer.json").read_bytes())["step"])


def load_checkpoint(trainer: PolicyTrainer, folder: Path) -> None:
    """Give ``trainer`` the weights, optimizer and counters of a checkpoint; bit for bit what was saved.

    Raises:
        CheckpointError: If the checkpoint is of another model.
    """
    loaded = load_policy(str(folder / "model"), device=torch.device("cpu"))
    try:
        trainer.model.load_state_dict(loaded.state_dict())
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in load_file(folder / "optimizer.safetensors").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        groups = trainer.optimizer.state_dict()["param_groups"]
        trainer.optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} does not fit the model: {str(error).splitlines()[0]}: use the model_path it was made with"
        ) from error
    counters = json.loads((folder / "trainer.json").read_bytes())
    trainer.steps_done = counters["steps_done"]
    trainer.skipped_in_a_row = counters["skipped_in_a_row"]


def _folders(root: Path) -> list[Path]:
    """Return the checkpoints below ``root``, oldest first."""
    if not root.is_dir():
        return []
    return sorted(
        (path for path in root.iterdir() if _FOLDER.fullmatch(path.name)), key=lambda path: int(path.name[5:])
    )
