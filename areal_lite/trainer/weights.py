"""Published weights: ordinary Hugging Face folders that appear whole or not at all.

A folder is written aside, flushed to disk, described by a ``manifest.json`` written last, and renamed
into place; an inference server told to load ``v00000007`` can never meet half of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from areal_lite.errors import CheckpointError, StorageError
from areal_lite.trainer.policy_model import without_progress_bars

_VERSION_FOLDER = re.compile(r"v(\d{8,})")
_KEPT = 2
_ASIDE = ".tmp-weights-"
_MANIFEST = "manifest.json"


def publish_weights(
    model: Any, directory_root: Path | str, version: int, *, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write ``directory_root/v{version:08d}`` and return it; the newest two versions stay.

    The folder holds config.json, generation_config.json, model.safetensors (Hugging Face names, tied
    weights once) in ``dtype``, and ``manifest.json``:
    ``{"schema": 1, "version": n, "files": {name: {"size": bytes, "sha256": hex}}}``.

    Raises:
        StorageError: If the disk is full or not writable.
    """
    root = Path(directory_root)
    folder = root / f"v{version:08d}"
    write_folder(folder, lambda aside: write_model(model, aside, dtype), version=version)
    older = [
        path
        for path in root.iterdir()
        if (match := _VERSION_FOLDER.fullmatch(path.name)) and int(match[1]) < version
    ]
    for path in sorted(older)[: -(_KEPT - 1)]:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def save_model(
    model: Any, tokenizer: Any, directory: Path | str, *, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write model and tokenizer to ``directory``, whole or not at all, in place of weights saved there before.

    Raises:
        StorageError: If the disk is full or not writable, or ``directory`` holds other files.
    """

    def write(aside: Path) -> None:
        write_model(model, aside, dtype)
        tokenizer.save_pretrained(aside)

    write_folder(Path(directory), write, version=None)
    return Path(directory)


def write_model(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights in ``dtype`` and the config as a Hugging Face folder."""
    by_storage: dict[int, torch.Tensor] = {}  # tied weights stay one tensor, which is then written once
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor = by_storage.setdefault(tensor.data_ptr(), tensor.to(dtype))
        state[name] = tensor
    with without_progress_bars():
        model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_folder(folder: Path, write: Callable[[Path], None], *, version: int | None) -> None:
    """Have ``write`` fill a folder aside, describe it by a manifest, and put it in the place of ``folder``.

    Raises:
        StorageError: If the disk is full or not writable, or ``folder`` holds files without a manifest.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / _MANIFEST).is_file():
        raise StorageError(
            f"{folder} holds files that are no published weights ({_MANIFEST} is missing): name another folder"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=folder.parent))
        aside.chmod(0o755)
        write(aside)
        for path in aside.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        files = {
            str(path.relative_to(aside)): _flush_and_hash(path)
            for path in sorted(aside.rglob("*"))
            if path.is_file()
        }
        manifest = {"schema": 1, "version": version, "files": files}
        (aside / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _flush(aside / _MANIFEST)
        _flush(aside)
        if folder.exists():
            folder.rename(Path(tempfile.mkdtemp(prefix=_ASIDE, dir=folder.parent)) / folder.name)
        aside.rename(folder)
        _flush(folder.parent)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"weights could not be written to {folder}: {error}: free disk space or mend its permissions"
        ) from error
    finally:
        _sweep(folder.parent)


def check_folder(folder: Path) -> None:
    """Read a folder of :func:`write_folder` back and compare it with its manifest.

    Raises:
        CheckpointError: If the manifest is missing or a file is not what it says.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        for name, told in manifest["files"].items():
            if _flush_and_hash(folder / name) != told:
                raise CheckpointError(
                    f"{folder / name} is not what {_MANIFEST} says: it was changed or cut off"
                )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} is not whole: {error}") from error


def _sweep(root: Path) -> None:
    """Remove what a failed or killed writer left; there is one writer, so nobody is at work on it."""
    for leftover in root.glob(_ASIDE + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _flush_and_hash(path: Path) -> dict[str, int | str]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
