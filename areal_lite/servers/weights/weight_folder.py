"""Published weights: ordinary Hugging Face folders, written atomically, so a server never loads half a version."""

import copy
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion
from areal_lite.data.chat.tokenizer import save_tokenizer
from areal_lite.files.atomic_folder import remove_folder, write_folder
from areal_lite.files.crash_points import crash_point
from areal_lite.models.lora import has_adapters, plain_weights, write_adapters
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.parallel.sharding import conversions_of, full_tensors, weights_of
from areal_lite.models.policy_model import quiet_transformers
from areal_lite.models.vision_model import vision_parameters

MAX_SHARD_BYTES = 4 << 30  # size of one file of weights, and of the memory needed to write it
WEIGHTS_FILE = "model.safetensors"
_VERSION_FOLDER = re.compile(r"v(\d{8,})")


def publish_weights(
    model: Any,
    directory_root: Path | str,
    version: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    adapters_only: bool = False,
) -> Path:
    """Write ``directory_root/v{version:08d}`` and return it; keep the newest two versions; raises StorageError. The
    folder holds config.json, generation_config.json, model.safetensors (Hugging Face names, tied weights once; several
    files and their index where the model is large) in ``dtype``, and the ``manifest.json`` of
    :mod:`areal_lite.files.atomic_folder`. With ``adapters_only`` it holds the adapters in float32 instead, in peft's
    format. Every rank must call this; the folder exists when rank 0 returns."""
    root = Path(directory_root)
    folder = root / version_name(version)
    write = partial(write_adapters, model) if adapters_only else partial(write_model, model, dtype=dtype)
    if Ranks.current().rank:
        write(folder)
        return folder
    write_folder(folder, write, kind="weights", version=version)
    keep_newest(root, 2, last=version)
    crash_point("weights:after_delete")
    return folder


def version_name(version: int) -> str:
    return f"v{version:08d}"


def keep_newest(root: Path, count: int, *, last: int) -> None:
    """Delete the published versions up to ``last`` but the newest ``count``; call it on rank 0."""
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _VERSION_FOLDER.fullmatch(path.name))]
    for _, path in sorted(one for one in found if one[0] <= last)[:-count]:
        remove_folder(path, kind="weights")


def save_model(model: Any, tokenizer: Any, directory: Path | str, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write model and tokenizer atomically to ``directory``, replacing weights saved there before. Adapters are merged,
    in float32 because a coarser ``dtype`` rounds much of them away, and also written to ``directory/adapters`` in
    peft's format. Every rank must call this; the folder exists when rank 0 returns."""
    adapted, first = has_adapters(model), Ranks.current().rank == 0

    def write(temporary: Path) -> None:
        write_model(model, temporary, torch.float32 if adapted else dtype)
        if adapted:
            write_adapters(model, temporary / "adapters")
        if first:
            save_tokenizer(tokenizer, temporary)

    folder = Path(directory)
    if first:
        write_folder(folder, write, kind="model", version=None)
    else:
        write(folder)
    return folder


def write_model(model: Any, folder: Path, dtype: torch.dtype, *, max_shard_bytes: float = MAX_SHARD_BYTES) -> None:
    """Write the weights in ``dtype``, with adapters merged, and the config as a Hugging Face folder. Every rank must
    call this; rank 0 writes. Besides the model it needs memory for one file of weights."""
    if not can_send(model):
        max_shard_bytes = math.inf  # one saved tensor may be made from several weights
    plain = copy.copy(model)  # shares the weights, has its own attributes
    plain._hf_peft_config_loaded = False  # or transformers would write only the adapters
    parts: list[Path] = []
    for weights in in_parts(full_tensors(plain_weights(model, dtype)), max_shard_bytes):
        with quiet_transformers():
            plain.save_pretrained(folder, state_dict=weights, max_shard_size=sys.maxsize)
        parts.append((folder / WEIGHTS_FILE).rename(folder / f"{len(parts)}.part"))
    if not parts:
        return
    _name_parts(folder, parts)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def sent_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in ``dtype``, with adapters merged, under their names in checkpoints; without a frozen vision
    tower, which servers have from the start. For models that :func:`can_send`."""
    frozen = {name for name, parameter in vision_parameters(model).items() if not parameter.requires_grad}
    names = _stored_names(model) if conversions_of(model) else {}
    return ((names.get(name, name), tensor) for name, tensor in plain_weights(model, dtype) if name not in frozen)


def can_send(model: Any) -> bool:
    """Return whether each weight is one tensor of a checkpoint, perhaps under another name."""
    return all(isinstance(one, WeightRenaming) for one in conversions_of(model))


def _stored_names(model: Any) -> dict[str, str]:
    names = list(weights_of(model))
    numbered: Any = {name: torch.tensor(number) for number, name in enumerate(names)}
    return {names[int(number)]: name for name, number in revert_weight_conversion(model, numbered).items()}


def in_parts(weights: Iterable[tuple[str, Tensor | None]], max_bytes: float) -> Iterator[dict[str, Tensor]]:
    """Yield the weights on the CPU in parts of at most ``max_bytes``; nothing on ranks without weights."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if tensor is None:
            continue
        if part and size + tensor.nbytes > max_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor.cpu()
        size += tensor.nbytes
    if part:
        yield part


def _name_parts(folder: Path, parts: list[Path]) -> None:
    if len(parts) == 1:
        parts[0].rename(folder / WEIGHTS_FILE)
        return
    files: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        with safe_open(part.rename(folder / name), framework="pt") as file:
            files |= dict.fromkeys(file.keys(), name)
    index = {"metadata": {}, "weight_map": files}
    (folder / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps(index, indent=2) + "\n")
