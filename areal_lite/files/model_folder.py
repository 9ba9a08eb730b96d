"""Check a checkpoint directory before any weight is changed. Imports no torch.

A directory is valid if its safetensors files are complete, their tensors have the names and shapes of the served model,
and, if it has a ``manifest.json``, each file has the size and SHA-256 in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.files.atomic_folder import DAMAGED, MANIFEST, check_files

if TYPE_CHECKING:
    from torch import Tensor

_DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointHeader:
    """Tensors of a directory's safetensors files, read from their headers."""

    path: Path
    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]
    locations: Mapping[str, tuple[Path, int, int]]
    """File, first byte and end byte (exclusive) of each tensor's data."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for file in self.files:
            with safe_open(str(file), framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 -- a safetensors file, not a mapping
                    yield name, shard.get_tensor(name)

    def same_data(self, name: str, other: str) -> bool:
        return self._hash(name) == self._hash(other)

    def _hash(self, name: str) -> bytes:
        file, start, end = self.locations[name]
        with file.open("rb") as stream:
            stream.seek(start)
            return hashlib.sha256(stream.read(end - start)).digest()


def read_checkpoint_header(path: Path) -> CheckpointHeader:
    """Read names and shapes of a checkpoint directory; raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"model_path {str(path)!r} is not a directory; give one that a trainer wrote.")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = tuple(path / name for name in sorted(set(weight_map.values())))
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{index} is not an index of weights ({error!r}). Save the checkpoint again.") from error
    else:
        files = tuple(sorted(path.glob("*.safetensors")))
    if not files:
        raise ConfigError(f"Cannot find any model weights with `{path}`: it has no *.safetensors file.")
    shapes: dict[str, tuple[int, ...]] = {}
    locations: dict[str, tuple[Path, int, int]] = {}
    for file in files:
        for name, (shape, start, end) in _read_file_header(file).items():
            shapes[name] = shape
            locations[name] = (file, start, end)
    if index.is_file() and (missing := sorted(set(weight_map) - set(shapes))):
        raise ConfigError(f"{index} lists {missing[0]!r}, but no file has it; save the checkpoint again.")
    return CheckpointHeader(path=path, files=files, shapes=shapes, locations=locations)


def _read_file_header(file: Path) -> dict[str, tuple[tuple[int, ...], int, int]]:
    broken = f"{file} is not a complete safetensors file"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_size = int.from_bytes(stream.read(8), "little")
            if header_size > size - 8:
                raise ConfigError(f"{broken}: its header is cut off. Save the checkpoint again.")
            header: dict[str, Any] = json.loads(stream.read(header_size))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape = tuple(entry["shape"])
            start, end = (8 + header_size + offset for offset in entry["data_offsets"])
            expected = math.prod(shape) * _DTYPE_BYTES.get(entry["dtype"], 0)
            if end > size or (expected and expected != end - start):
                raise ConfigError(f"{broken}: the data of {name!r} is cut off. Save the checkpoint again.")
            tensors[name] = (shape, start, end)
        return tensors
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{broken} ({error}). Save the checkpoint again.") from error


def check_manifest(path: Path) -> None:
    """Compare the files of ``path`` with its ``manifest.json``, if it has one; raises ConfigError.

    The manifest is ``{"files": {NAME: {"size": BYTES, "sha256": HEX}}}``, written after the files.
    """
    if (path / MANIFEST).is_file():
        try:
            check_files(path, json.loads((path / MANIFEST).read_bytes()))
        except (CheckpointError, *DAMAGED) as error:
            raise ConfigError(f"{path} does not fit its {MANIFEST} ({error}); save the checkpoint again.") from error


def check_shapes(
    source: str, given: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
) -> None:
    """Check that new weights fit the served model; ``tied`` maps the second name of a tied weight to the first."""
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(tied.get(name, name), []).append(name)
    missing = [group[0] for group in groups.values() if not any(name in given for name in group)]
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
