"""Folders that are written atomically and can be verified later.

A folder is written under a temporary name, flushed to disk, described by ``manifest.json``, which is written last, and
renamed: under its final name it is always complete, even after a crash. The manifest is ``{"schema": 1, "version": n,
"files": {name: {"size": bytes, "sha256": hex}}}``. One process at a time may write below its parent.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from safetensors import SafetensorError
from areal_lite.errors import CheckpointError, StorageError
from areal_lite.files.crash_points import crash_point

Kind = Literal["weights", "model", "checkpoint"]
_TEMPORARY = ".areal-lite-tmp-"  # prefix of folders that are being written or deleted
MANIFEST = "manifest.json"
_SCHEMA = 1
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)  # errors that reading a damaged manifest may raise


def write_folder(folder: Path, write: Callable[[Path], None], *, kind: Kind, version: int | None) -> None:
    """Let ``write`` fill a temporary folder, add a manifest, and replace ``folder`` with it; raises StorageError."""
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
            raise StorageError(
                f"{folder} holds files that areal_lite did not write ({MANIFEST} is missing): choose another folder"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder.parent)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder.parent))
        temporary.chmod(0o755)
        write(temporary)
        crash_point(f"{kind}:before_manifest")
        paths = sorted(temporary.rglob("*"))
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)
            _flush(path)
        files = {str(path.relative_to(temporary)): _digest(path) for path in paths if path.is_file()}
        manifest = {"schema": _SCHEMA, "version": version, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        (temporary / MANIFEST).chmod(0o644)
        _flush(temporary / MANIFEST)
        _flush(temporary)
        crash_point(f"{kind}:after_manifest")
        if folder.exists():
            folder.rename(Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder.parent)) / folder.name)
        temporary.rename(folder)
        _flush(folder.parent)
        crash_point(f"{kind}:after_rename")
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the {kind} could not be written to {folder}: {error}: free disk space or fix its permissions"
        ) from error
    finally:
        sweep(folder.parent)


def check_folder(folder: Path, manifest: Any = None) -> None:
    """Compare the files of a folder with its manifest, which a caller may have read already; raises CheckpointError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes()) if manifest is None else manifest
        if manifest["schema"] != _SCHEMA:
            raise CheckpointError(
                f"{folder} has schema {manifest['schema']} and this version reads {_SCHEMA}: use the one that wrote it"
            )
        check_files(folder, manifest)
    except DAMAGED as error:
        raise CheckpointError(f"{folder} is incomplete: {error}") from error


def check_files(folder: Path, manifest: Any) -> None:
    """Compare the files of a folder with its manifest; raises CheckpointError, or one of ``DAMAGED``."""
    for name, expected in manifest["files"].items():
        if (folder / name).stat().st_size != expected["size"] or _digest(folder / name) != expected:
            raise CheckpointError(f"{folder / name} differs from {MANIFEST}: it was changed or cut")


def remove_folder(folder: Path, *, kind: Kind) -> None:
    """Delete a folder of :func:`write_folder`; it never appears incomplete under its name."""
    temporary = folder.with_name(f"{_TEMPORARY}{folder.name}")
    try:
        folder.rename(temporary)
        _flush(folder.parent)
    except OSError as error:
        raise StorageError(f"{folder} cannot be deleted: {error}: fix its permissions") from error
    crash_point(f"{kind}:during_delete")
    shutil.rmtree(temporary, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove the leftovers of a failed or killed writer."""
    for leftover in root.glob(_TEMPORARY + "*"):
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
