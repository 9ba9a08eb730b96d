"""Published weights: ordinary Hugging Face folders; a server told to load ``v00000007`` never meets half of it."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping

from areal_lite.trainer.crash_points import crash_point
from areal_lite.trainer.lora import has_adapters, plain_weights, write_adapters
from areal_lite.trainer.policy_model import without_progress_bars
from areal_lite.trainer.ranks import Ranks
from areal_lite.trainer.sharding import full_tensors
from areal_lite.trainer.whole_folder import remove_folder, write_folder

MAX_SHARD_BYTES = 4 << 30
"""Weights in one file; also what writing them takes in memory."""

_FILE = "model.safetensors"
_VERSION_FOLDER = re.compile(r"v(\d{8,})")
_KEPT = 2


def publish_weights(
    model: Any, directory_root: Path | str, version: int, *, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write ``directory_root/v{version:08d}`` and return it; the newest two versions stay.

    The folder holds config.json, generation_config.json, model.safetensors (Hugging Face names, tied
    weights once; several files and their index where the model is large) in ``dtype``, and the ``manifest.json`` of
    :mod:`areal_lite.trainer.whole_folder`. Every rank must call it; the folder is there when the first returns.

    Raises:
        StorageError: If the disk is full or not writable.
    """
    root = Path(directory_root)
    folder = root / f"v{version:08d}"
    if Ranks.current().rank:
        write_model(model, folder, dtype)
        return folder
    write_folder(folder, lambda aside: write_model(model, aside, dtype), kind="weights", version=version)
    older = [
        path
        for path in root.iterdir()
        if (match := _VERSION_FOLDER.fullmatch(path.name)) and int(match[1]) < version
    ]
    for path in sorted(older)[: -(_KEPT - 1)]:
        remove_folder(path, kind="weights")
    crash_point("weights:after_delete")
    return folder


def save_model(
    model: Any, tokenizer: Any, directory: Path | str, *, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write model and tokenizer to ``directory``, whole or not at all, in place of weights saved there before.

    Adapters are merged in, and lie alone in ``directory/adapters``, in peft's format. Every rank must call it; the
    folder is there when the first returns.

    Raises:
        StorageError: If the disk is full or not writable, or ``directory`` holds other files.
    """

    def write(aside: Path) -> None:
        write_model(model, aside, dtype)
        if has_adapters(model):
            write_adapters(model, aside / "adapters")

    def write_all(aside: Path) -> None:
        write(aside)
        tokenizer.save_pretrained(aside)

    folder = Path(directory)
    if Ranks.current().rank:
        write(folder)
    else:
        write_folder(folder, write_all, kind="model", version=None)
    return folder


def write_model(
    model: Any, folder: Path, dtype: torch.dtype, *, max_shard_bytes: float = MAX_SHARD_BYTES
) -> None:
    """Write the weights in ``dtype``, adapters merged in, and the config as a Hugging Face folder.

    Every rank must call it, and the first writes. Beyond the model it needs memory for one file of weights.
    """
    if getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False):
        max_shard_bytes = math.inf  # names in the folder differ, and may need several weights to be made
    plain = copy.copy(model)  # the same weights; attributes of its own
    plain._hf_peft_config_loaded = False  # or transformers would write the adapters alone
    parts: list[Path] = []
    for weights in _shards(full_tensors(plain_weights(model, dtype)), max_shard_bytes):
        with without_progress_bars():
            plain.save_pretrained(folder, state_dict=weights, max_shard_size=sys.maxsize)
        parts.append((folder / _FILE).rename(folder / f"{len(parts)}.part"))
    if not parts:
        return
    _name_parts(folder, parts)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _shards(weights: Iterable[tuple[str, Tensor | None]], max_bytes: float) -> Iterator[dict[str, Tensor]]:
    """Yield weights that fill a file, copied to the CPU; nothing on ranks that have none."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if tensor is None:
            continue
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.cpu()
        size += tensor.nbytes
    if shard:
        yield shard


def _name_parts(folder: Path, parts: list[Path]) -> None:
    """Give the files of weights the names that Hugging Face's loaders look for."""
    if len(parts) == 1:
        parts[0].rename(folder / _FILE)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        with safe_open(part.rename(folder / name), framework="pt") as file:
            places |= dict.fromkeys(file.keys(), name)
    index = {"metadata": {}, "weight_map": places}
    (folder / f"{_FILE}.index.json").write_text(json.dumps(index, indent=2) + "\n")
