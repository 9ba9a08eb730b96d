"""Weights and low-rank adapters in peft's format that a server is to load, checked before it changes its own.

Guarantees that the files of a folder are complete, that its tensors have the names and shapes of the served model, and
that each file has the size and SHA-256 of ``manifest.json``, if there is one.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.files.atomic_folder import DAMAGED, MANIFEST, check_files
from areal_lite.files.model_path import stored_tensors
from areal_lite.models.vision_model import TOWERS, own_name

Shapes = Mapping[str, tuple[int, ...]]
_CHANGES_THE_RESULT = (
    *("use_dora", "use_rslora", "use_qalora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("target_parameters", "trainable_token_indices", "layer_replication"),
)
"""Keys of adapter_config.json that must be off."""


class Checkpoint:
    """A directory's safetensors by their names in the served ``model``, only headers read yet; raises ConfigError."""

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

    def read(self, name: str) -> Tensor:
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


def check_fit(
    source: str, given: Shapes, shapes: Shapes, tied: Mapping[str, str], read: Callable[[str], Tensor]
) -> None:
    """Check that new weights, which ``read`` returns, fit the served model, and are one tensor where it ties two;
    ``tied`` maps the second name of a tied weight to the first. Raises ConfigError. The weights of an image model's
    tower may be missing: they stay, as they do not train by default."""
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(tied.get(name, name), []).append(name)
    missing = [one for one, *more in groups.values() if not (given.keys() & {one, *more} or one.startswith(TOWERS))]
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
    for second, first in tied.items():
        if first in given and second in given and not torch.equal(read(first), read(second)):
            raise ConfigError(
                f"{source} has different tensors for {first!r} and {second!r}, which the served "
                "model ties; the server keeps its weights. Train with tied embeddings, or serve an untied model."
            )


@dataclass(frozen=True, slots=True)
class Adapter:
    """The matrices of each adapted layer, for weights that stay as they are. An adapted layer computes what peft
    computes, with the same operations in the adapter's own precision."""

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
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
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
