"""Published weights in shared memory, for servers on this machine: no file is written, hashed or read.

A folder looks like one of ``weight_folder.publish_weights``, but its model.safetensors links to memory of this process,
freed however that ends. Two folders take turns, so a server still reading one never sees the next being written.
"""

import json
import math
import mmap
import os
import shutil
from pathlib import Path
from typing import Any
import torch
from torch import Tensor
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.parallel.sharding import full_tensors
from areal_lite.servers.weights.weight_folder import WEIGHTS_FILE, sent_weights, write_model


class SharedWeights:
    """The two newest versions of a model's weights, in folders below ``root`` until ``close``. Every rank has one and
    makes the same calls; the folders are on rank 0."""

    def __init__(self, root: Path, *, dtype: torch.dtype) -> None:
        self._root = root
        self._dtype = dtype
        self._opened: dict[Path, _MappedFile | None] = {}
        """The file behind each folder that was published to; None on ranks other than the first."""

    def publish(self, model: Any, version: int) -> Path:
        """Write the weights, with adapters merged, and return their folder."""
        folder = self._root / f"shared-{version % 2}"
        if folder not in self._opened:  # its first version is written as a file, which is then moved to memory
            first = Ranks.current().rank == 0
            if first and folder.exists():  # of a run that was killed
                shutil.rmtree(folder)
            write_model(model, folder, self._dtype, max_shard_bytes=math.inf)
            self._opened[folder] = _MappedFile(folder / WEIGHTS_FILE) if first else None
            return folder
        file = self._opened[folder]
        for name, tensor in full_tensors(sent_weights(model, self._dtype)):
            if file is not None:
                assert tensor is not None
                file.write(name, tensor)
        return folder

    def close(self) -> None:
        """Free the memory and remove the folders; servers that have loaded the weights keep them."""
        for folder, file in self._opened.items():
            if file is not None:
                file.close()
                shutil.rmtree(folder, ignore_errors=True)
        self._opened.clear()


class _MappedFile:
    """A safetensors file moved to memory; in its place is a link."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.memfd_create(file.name)
        with file.open("rb") as stream, open(self._descriptor, "wb", closefd=False) as memory:
            shutil.copyfileobj(stream, memory, 1 << 24)
        file.unlink()
        file.symlink_to(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        content = mmap.mmap(self._descriptor, 0)
        data_at = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:data_at])
        every_byte = torch.frombuffer(content, dtype=torch.uint8)
        self._tensors = {
            name: every_byte[data_at + entry["data_offsets"][0] : data_at + entry["data_offsets"][1]]
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def write(self, name: str, tensor: Tensor) -> None:
        self._tensors[name].copy_(tensor.contiguous().flatten().view(torch.uint8))

    def close(self) -> None:
        os.close(self._descriptor)
