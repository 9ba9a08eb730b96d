"""Low-rank adapters on frozen weights, with peft (LoRA, arXiv:2106.09685).

Guarantees that the initial weights never change: with adapters disabled the model is the reference, bit for bit,
and merged weights are separate tensors. The model keeps its class.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D
from transformers.utils.peft_utils import check_peft_version
from areal_lite.config.trainer_config import AdapterShape, LoRAConfig
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.files.model_path import stored_tensors
from areal_lite.models.parallel.sharding import full_tensors, read_into, weights_of
from areal_lite.models.vision_model import auto_class_of, vision_parameters

_ADAPTER = "default"
_PREFIX = "base_model.model."  # of every name in peft's files


def add_adapters(model: Any, config: LoRAConfig) -> None:
    """Add float32 adapters with zero effect to the model's linear layers; only they train from here on. Raises
    ConfigError if peft is missing or too old, or ``config.target_modules`` names what is not a linear layer."""
    from transformers.integrations.peft import MIN_PEFT_VERSION  # which takes two seconds

    try:
        check_peft_version(MIN_PEFT_VERSION)
        from peft import LoraConfig
    except (ImportError, ValueError) as error:
        fix = "pip install -U peft, or an older transformers, or set trainer.lora: null"
        raise ConfigError(f"trainer.lora needs peft {MIN_PEFT_VERSION} or newer: {fix}") from error
    model.add_adapter(
        LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]
            target_modules=_layer_names(model, config.target_modules),
            exclude_modules=_vision_layers(model) or None,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            task_type="CAUSAL_LM",
        ),
        _ADAPTER,
    )
    if (base := Path(model.name_or_path)).is_dir():  # peft's files name it, and may be read from another directory
        model.peft_config[_ADAPTER].base_model_name_or_path = str(base.resolve())


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Disable the adapters, so that the model is the one before :func:`add_adapters`; not for backward passes."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def has_adapters(model: Any) -> bool:
    return bool(getattr(model, "peft_config", None))


def plain_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in ``dtype`` with adapters merged, under the base model's names; tied weights once. Adapters
    are merged in float32, one layer at a time, into new tensors."""
    layers = {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    for name, weight in weights_of(model).items():
        tensor = weight.detach()
        if name in layers:
            tensor = tensor + layers[name].get_delta_weight(_ADAPTER).detach()
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def write_adapters(model: Any, folder: Path) -> None:
    """Write the adapters in peft's format, which names their base model. Every rank must call this; rank 0 writes."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    weights = {name: whole for name, whole in full_tensors(trained) if whole is not None}
    if weights:
        model.save_pretrained(folder, state_dict=weights)


def load_adapters(model: Any, folder: Path) -> None:
    """Load what :func:`write_adapters` wrote, bit for bit; CheckpointError if layers, rank or alpha differ."""
    from peft import get_peft_model_state_dict

    own = {f"{_PREFIX}{name}": value for name, value in get_peft_model_state_dict(model).items()}
    saved = stored_tensors(folder)
    alpha = json.loads((folder / "adapter_config.json").read_bytes())["lora_alpha"]
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    if alpha != model.peft_config[_ADAPTER].lora_alpha or shapes != {name: one.shape for name, one in saved.items()}:
        raise CheckpointError(
            f"the adapters in {folder} have other layers, rank or alpha than the model's: use the trainer.lora "
            "they were trained with"
        )
    read_into(own, saved)


def adapter_shape(model: Any) -> AdapterShape:
    config = model.peft_config[_ADAPTER]
    return AdapterShape(config.r, tuple(sorted({name.rpartition(".")[2] for name in config.target_modules})))


def planned_shape(model_path: str, config: LoRAConfig) -> AdapterShape:
    """Return the shape of the adapters that the model in a folder would get; raises like :func:`add_adapters`."""
    with torch.device("meta"):
        model = auto_class_of(model_path).from_config(AutoConfig.from_pretrained(model_path))  # nosec B615 # a folder
        add_adapters(model, config)
    return adapter_shape(model)


def _vision_layers(model: Any) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in vision_parameters(model)})


def _layer_names(model: Any, wanted: str | list[str]) -> list[str]:
    head, vision = model.get_output_embeddings(), _vision_layers(model)
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and name not in vision
    ]
    last = sorted({name.rpartition(".")[2] for name in linear})
    if wanted == "all-linear":
        return last
    names = [wanted] if isinstance(wanted, str) else wanted
    if (unknown := [n for n in names if not any(f".{layer}".endswith(f".{n}") for layer in linear)]) or not names:
        raise ConfigError(
            f"trainer.lora.target_modules names {unknown}, which are not linear layers below the output embedding: use "
            f"all-linear or some of {last}"
        )
    return names
