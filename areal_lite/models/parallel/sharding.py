"""A model sharded over the ranks: each keeps a part of every weight, gradient and optimizer state, and reads only the
rows of a file that it keeps.

Guarantees that a full weight exists only while its layer computes or while it is written, and that a model is loaded by
shard only if each of its weights is stored under its own name and in its own shape; others (renamed, joined, quantized)
are loaded whole on each rank. Until :func:`fill` the weights take no memory: the system gives it to a page that is
written. Knows nothing of losses: gradients are averaged over the ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import StoredTensor, stored_tensors
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.parallel.tensor_parallel import divide_layers


def empty_model(auto_class: Any, model_path: str, **options: Any) -> tuple[Any, list[str]] | None:
    """Return a float32 model to be sharded and filled, and the weights that its folder lacks; None if it must be loaded
    whole, as one on the hub is. A folder may lack those of a head, set by the caller; ``options`` change the config."""
    if not (folder := Path(model_path).expanduser()).is_dir():
        return None
    with suppress(OSError, ValueError, ConfigError):  # loading it whole gives the reason
        stored = stored_tensors(folder)
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
                    local, part = own_part(weight)
                    local.copy_(opened.get_slice(name)[part] if weight.ndim else opened.get_tensor(name))


def own_part(weight: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return the part of ``weight`` that this rank keeps, and which rows, columns and so on it is."""
    if not isinstance(weight, DTensor):
        return weight, (slice(None),) * weight.ndim
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return weight.to_local(), tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


M = TypeVar("M", bound=Any)


def shard(module: M) -> M:
    """Shard ``module`` in place over the ranks and return it; a single process leaves it unchanged.

    Each layer is gathered while it computes. Weights outside of layers (embeddings, last norm, head) are gathered for
    the whole forward and backward pass of ``module``: only its ``forward`` may use them directly. Call this before
    the optimizer is made. An empty model is filled; with ``sp`` or ``tp`` ranks ``module`` reads in parts from then on.
    """
    ranks = Ranks.current()
    if ranks.tp > 1:
        divide_layers(module.model, ranks)
    if ranks.size > 1:
        kind, whole = ranks.device_type or next(module.parameters()).device.type, ranks.mesh
        mesh = init_device_mesh(kind, (ranks.size,)) if whole is None else whole["dp", "sp"]._flatten()
        layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
        for layer in reversed(layers):  # FSDP wants inner modules first
            fully_shard(layer, mesh=mesh)
        # Reshard even after a pass without gradient, so that weights outside of forward are always sharded.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        if is_empty(getattr(module, "model", None)):
            fill(module.model)
            module.examine()
    if ranks.sp * ranks.tp > 1:
        module.read_in_parts(ranks)
    return module


def full_tensors(
    tensors: Iterable[tuple[str, Tensor]], owners: Mapping[str, int] | None = None
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the named tensors, gathered one at a time, on their owner, by default rank 0; None on other ranks. Every
    rank must iterate over all of them. Besides their shards, ranks need memory for two tensors."""
    rank = Ranks.current().rank
    for name, tensor in tensors:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, full if rank == (owners or {}).get(name, 0) else None


def shared_out(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return an owner for each tensor: the rank that owns the fewest bytes so far."""
    owners, owned = {}, [0] * Ranks.current().size
    for name, tensor in tensors.items():
        owners[name] = owned.index(min(owned))
        owned[owners[name]] += tensor.numel() * tensor.element_size()
    return owners
