"""Weights read by shard: a rank reads from the files only the rows that it keeps.

Guarantees that a model is loaded so only if each of its weights is stored under its own name and in its own shape;
others (renamed, joined, quantized) are loaded whole on each rank. Until :func:`fill` the weights take no memory: the
system gives it to a page that is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import no_init_weights

from areal_lite.errors import ConfigError
from areal_lite.files.model_path import StoredTensor, stored_tensors


def empty_model(auto_class: Any, model_path: str, **options: Any) -> tuple[Any, list[str]] | None:
    """Return a float32 model to be sharded and filled, and the weights that its folder lacks; None if it must be loaded
    whole. The weights that a folder may lack are those of a head, which the caller sets.

    Args:
        auto_class: The class of transformers to load it with.
        model_path: A folder; a name on the hub is loaded whole.
        options: Changes to the model's config.
    """
    folder = Path(model_path).expanduser()
    with suppress(OSError, ValueError, ConfigError):  # loading it whole gives the reason
        stored = stored_tensors(folder) if folder.is_dir() else {}
        config = AutoConfig.from_pretrained(folder, **options)  # nosec B615 # a folder
        if not stored or getattr(config, "quantization_config", None) or hasattr(config, "auto_map"):
            return None
        config.name_or_path = model_path
        with no_init_weights():
            model = auto_class.from_config(config, dtype=torch.float32)
        model.tie_weights()
        body = f"{model.base_model_prefix}."
        shapes = {name: one.shape for name, one in stored.items()}
        missing = [name for name, weight in weights_of(model).items() if shapes.get(name) != tuple(weight.shape)]
        if conversions_of(model) or any(name in stored or name.startswith(body) for name in missing):
            return None
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(folder)  # nosec B615 # a folder
        model.eval().stored_weights = stored
        return model, missing
    return None


def conversions_of(model: Any) -> list[Any]:
    """Return how checkpoints name weights differently than the model does, or make one from several; empty if not."""
    return getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)


def is_empty(model: Any) -> bool:
    """Return whether the model waits for :func:`fill`."""
    return hasattr(model, "stored_weights")


def fill(model: Any) -> None:
    """Read the weights of a model of :func:`empty_model`, whole or sharded, in place."""
    if is_empty(model):
        stored = model.stored_weights
        del model.stored_weights
        read_into({name: weight for name, weight in weights_of(model).items() if name in stored}, stored)


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return parameters and saved buffers, without adapters, under the names of the base model; tied ones once."""
    saved = {name: weight for name, weight in model.state_dict(keep_vars=True).items() if ".lora_" not in name}
    first = {id(weight): name for name, weight in reversed(saved.items())}
    return {name.replace(".base_layer.", "."): saved[name] for name in saved if first[id(saved[name])] == name}


@torch.no_grad()
def read_into(weights: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Read what this rank keeps of each weight; files are opened one at a time."""
    for file in sorted({stored[name].file for name in weights}):
        with safe_open(str(file), framework="pt") as opened:
            for name, weight in weights.items():
                if stored[name].file == file:
                    local, rows = own_rows(weight)
                    local.copy_(opened.get_slice(name)[rows] if weight.ndim else opened.get_tensor(name))


def own_rows(weight: Tensor) -> tuple[Tensor, slice]:
    """Return the part of ``weight`` that this rank keeps, and which rows it is."""
    if not isinstance(weight, DTensor):
        return weight, slice(None)
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return weight.to_local(), slice(offset[0], offset[0] + shape[0])
