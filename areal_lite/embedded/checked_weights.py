"""Weights that a server is to load, checked before the first of its own is changed.

Guarantees that a checkpoint's files are complete, that its tensors have the names and shapes of the served model, and
that each file has the size and SHA-256 of ``manifest.json``, if there is one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.files.atomic_folder import DAMAGED, MANIFEST, check_files
from areal_lite.files.model_path import stored_tensors
from areal_lite.models.vision_model import TOWERS, own_name


class Checkpoint:
    """The safetensors files of a directory, of which only the headers are read yet, under the names that their weights
    have in the served ``model``; raises ConfigError."""

    def __init__(self, path: Path, model: Any) -> None:
        self.path, self._model = path, model
        stored = stored_tensors(path)
        self._names = {own_name(model, name): name for name in stored}
        self._stored = {own: stored[name] for own, name in self._names.items()}
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for file in dict.fromkeys(stored.file for stored in self._stored.values()):
            with safe_open(str(file), framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 -- a safetensors file, not a mapping
                    yield own_name(self._model, name), shard.get_tensor(name)

    def has_equal(self, *names: str) -> bool:
        """Return whether two tensors hold the same data."""
        one, other = (self._read(name) for name in names)
        return torch.equal(one, other)

    def _read(self, name: str) -> Tensor:
        with safe_open(str(self._stored[name].file), framework="pt") as shard:
            tensor: Tensor = shard.get_tensor(self._names[name])
            return tensor


def check_manifest(path: Path) -> None:
    """Compare the files of ``path`` with its ``manifest.json``, if it has one; raises ConfigError. The manifest is
    ``{"files": {NAME: {"size": BYTES, "sha256": HEX}}}``, written after the files."""
    if (path / MANIFEST).is_file():
        try:
            check_files(path, json.loads((path / MANIFEST).read_bytes()))
        except (CheckpointError, *DAMAGED) as error:
            raise ConfigError(f"{path} does not fit its {MANIFEST} ({error}); save the checkpoint again.") from error


def check_shapes(
    source: str, given: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
) -> None:
    """Check that new weights fit the served model; ``tied`` maps the second name of a tied weight to the first.

    The weights of an image model's tower may be missing: they stay, as they do not train by default.
    """
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(tied.get(name, name), []).append(name)
    missing = [first for first, *more in groups.values() if not given.keys() & {first, *more}]
    missing = [name for name in missing if not name.startswith(TOWERS)]
    unknown = [name for name in given if name not in shapes]
    wrong = [name for name, shape in given.items() if name in shapes and shapes[name] != shape]
    for names, what in ((missing, "lacks"), (unknown, "has unknown"), (wrong, "has a wrong shape for")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            detail = f" {given[names[0]]} instead of {shapes[names[0]]}" if names is wrong else ""
            raise ConfigError(
                f"{source} {what} {names[0]!r}{detail}{more}; the server keeps its weights. Save the whole "
                "model, with the architecture of the served one."
            )


def check_tied(source: str, given: Collection[str], tied: Mapping[str, str], same: Callable[[str, str], bool]) -> None:
    """Check that new weights have the ``same`` tensor for names that the served model ties; raises ConfigError."""
    for second, first in tied.items():
        if first in given and second in given and not same(first, second):
            raise ConfigError(
                f"{source} has different tensors for {first!r} and {second!r}, which the served "
                "model ties; the server keeps its weights. Train with tied embeddings, or serve an untied model."
            )
