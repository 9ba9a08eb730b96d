"""Low-rank adapters in peft's format, on top of served weights that stay as they are.

Guarantees that an adapted layer computes what peft computes, with the same operations in the adapters' own precision.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from areal_lite.embedded.checked_weights import check_manifest
from areal_lite.errors import ConfigError

_PREFIX = "base_model.model."  # of every name in peft's files
_CHANGES_THE_RESULT = (
    *("use_dora", "use_rslora", "use_qalora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("target_parameters", "trainable_token_indices", "layer_replication"),
)
"""Keys of adapter_config.json that must be off."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The matrices of each adapted layer."""

    layers: dict[str, tuple[Tensor, Tensor]]  # A ``[rank, inputs]`` and B ``[outputs, rank]`` by the layer's name
    scale: float

    def attach(self, model: Any) -> list[RemovableHandle]:
        """Add ``B A x * scale`` to the layers' outputs until the handles are removed."""
        return [
            model.get_submodule(name).register_forward_hook(
                partial(_add, a=a.to(model.device), b=b.to(model.device), scale=self.scale)
            )
            for name, (a, b) in self.layers.items()
        ]


def _add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, *, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return (output + linear(linear(inputs[0].to(a.dtype), a), b) * scale).to(output.dtype)


def read_adapter(path: str, model: Any) -> Adapter:
    """Read a folder with adapter_config.json and adapter_model.safetensors, and check that it fits the model. Raises
    ConfigError if a file is missing, changed or cut, or the adapters are of another kind or for other layers."""
    folder = Path(path).expanduser()
    check_manifest(folder)
    try:
        config = json.loads((folder / "adapter_config.json").read_bytes())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        weights = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{folder} is not a complete folder of adapters in peft's format ({error!r})") from error
    odd = [name for name in _CHANGES_THE_RESULT if config.get(name)]
    odd += [name for name, plain in (("peft_type", "LORA"), ("bias", "none")) if config.get(name, plain) != plain]
    if odd:
        raise ConfigError(f"{folder} sets {odd[0]}={config[odd[0]]!r}: the embedded server serves plain LoRA adapters")
    layers = {}
    for name in [name for name in weights if name.endswith(".lora_A.weight")]:
        layer = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        layers[layer] = weights.pop(name), weights.pop(name.replace(".lora_A.", ".lora_B."), torch.empty(0))
        _check_layer(folder, layer, *layers[layer], rank, model)
    if weights or not layers:
        raise ConfigError(f"{folder} has no adapters, or tensors that are not: {sorted(weights)[:3]}")
    return Adapter(layers, alpha / rank)


def _check_layer(folder: Path, name: str, a: Tensor, b: Tensor, rank: int, model: Any) -> None:
    try:
        weight = model.get_submodule(name).weight
    except AttributeError:
        raise ConfigError(f"{folder} adapts {name!r}, which the served model lacks") from None
    inputs, outputs = a.shape[-1], b.shape[0]
    if (a.shape, b.shape) != ((rank, inputs), (outputs, rank)) or {inputs, outputs} != set(weight.shape):
        raise ConfigError(
            f"{folder} has matrices {tuple(a.shape)} and {tuple(b.shape)} of rank {rank} for {name!r}, whose weight is "
            f"{tuple(weight.shape)}"
        )
