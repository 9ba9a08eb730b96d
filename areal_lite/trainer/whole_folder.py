"""Folders that appear whole or not at all, and that can be judged later.

A folder is written aside, flushed to disk, described by ``manifest.json``, which is written last, and renamed
into place: whoever finds it under its name finds all of it, after a crash as well. The manifest is
``{"schema": 1, "version": n, "files": {name: {"size": bytes, "sha256": hex}}}``. One process at a time writes
below one parent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from areal_lite.errors import CheckpointError, StorageError
from areal_lite.trainer.crash_points import crash_point

Kind = Literal["weights", "model", "checkpoint"]

_ASIDE = ".areal-lite-tmp-"
"""How the names of folders begin that are being written or deleted."""
_MANIFEST = "manifest.json"
_SCHEMA = 1


def write_folder(folder: Path, write: Callable[[Path], None], *, kind: Kind, version: int | None) -> None:
    """Have ``write`` fill a folder aside, describe it by a manifest, and put it in the place of ``folder``.

    Raises:
        StorageError: If the disk is full or not writable, or ``folder`` holds files without a manifest.
    """
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / _MANIFEST).is_file():
            raise StorageError(
                f"{folder} holds files that are no {kind} of ours ({_MANIFEST} is missing): name another folder"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder.parent)
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=folder.parent))
        aside.chmod(0o755)
        write(aside)
        crash_point(f"{kind}:before_manifest")
        inside = sorted(aside.rglob("*"))
        for path in inside:
            path.chmod(0o755 if path.is_dir() else 0o644)
            _flush(path)
        files = {str(path.relative_to(aside)): _digest(path) for path in inside if path.is_file()}
        manifest = {"schema": _SCHEMA, "version": version, "files": files}
        (aside / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _flush(aside / _MANIFEST)
        _flush(aside)
        crash_point(f"{kind}:after_manifest")
        if folder.exists():
            folder.rename(Path(tempfile.mkdtemp(prefix=_ASIDE, dir=folder.parent)) / folder.name)
        aside.rename(folder)
        _flush(folder.parent)
        crash_point(f"{kind}:after_rename")
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the {kind} could not be written to {folder}: {error}: free disk space or mend its permissions"
        ) from error
    finally:
        sweep(folder.parent)


def check_folder(folder: Path) -> None:
    """Read a folder of :func:`write_folder` back and compare it with its manifest.

    Raises:
        CheckpointError: If the manifest is missing or of another version, or a file is not what it says.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        if manifest["schema"] != _SCHEMA:
            raise CheckpointError(
                f"{folder} has schema {manifest['schema']} and this version reads {_SCHEMA}: use the version that "
                "wrote it"
            )
        for name, told in manifest["files"].items():
            if _digest(folder / name) != told:
                raise CheckpointError(
                    f"{folder / name} is not what {_MANIFEST} says: it was changed or cut off"
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is not whole: {error}") from error


def remove_folder(folder: Path, *, kind: Kind) -> None:
    """Delete a folder of :func:`write_folder`; nobody meets a part of it under its name.

    Raises:
        StorageError: If it cannot be renamed.
    """
    aside = folder.with_name(f"{_ASIDE}{folder.name}")
    try:
        folder.rename(aside)
        _flush(folder.parent)
    except OSError as error:
        raise StorageError(f"{folder} cannot be deleted: {error}: mend its permissions") from error
    crash_point(f"{kind}:during_delete")
    shutil.rmtree(aside, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what a failed or killed writer left."""
    for leftover in root.glob(_ASIDE + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _digest(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
