"""Loads Hugging Face models for training: in float32, without dropout, with every weight from the folder."""

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.utils import logging as transformers_logging
from areal_lite.config.trainer_config import LearnerConfig, LoRAConfig
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_hub_name, is_hub_name, stored_config
from areal_lite.models.lora import add_adapters
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.parallel.sequence_parallel import refuse_heads
from areal_lite.models.parallel.sharding import empty_model, is_empty
from areal_lite.models.parallel.tensor_parallel import refuse_images, refuse_plan
from areal_lite.models.vision_model import auto_class_of, vision_parameters

logger = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")  # lists the instructions of each CPU core, on Linux
_NOT_SCORABLE = {
    "falcon with alibi": "which takes no mask for several sequences",
    **dict.fromkeys(("llama4", "llama4_text", "modernbert-decoder"), "which does not give its decoder"),
}
"""Kinds of models that cannot be trained here, with the reason."""


def load_policy(
    model_path: str,
    *,
    device: torch.device,
    gradient_checkpointing: bool = False,
    lora: LoRAConfig | None = None,
    vision: Literal["frozen", "train"] = "frozen",
) -> Any:
    """Return the causal LM on ``device``, ready for backward passes; with ``lora`` only its adapters train, and without
    ``vision: train`` neither the vision tower nor its connector. Raises ConfigError if ``model_path`` is neither a
    model folder nor a model on the hub or in its cache, lacks weights, or adapters cannot be added."""
    model, missing = load_pretrained(auto_class_of(model_path), model_path, what="causal LM", by_shard=True)
    if missing:
        raise ConfigError(
            f"model_path {model_path!r} has no weights for {missing}: give the folder of a complete causal LM, "
            "not of a critic or reward model made from one"
        )
    for parameter in vision_parameters(model).values():
        parameter.requires_grad_(vision == "train")
    if lora is not None:
        add_adapters(model, lora)
    return prepare(model, device=device, gradient_checkpointing=gradient_checkpointing)


def load_scalar_model(auto_class: Any, model_path: str, *, what: str, by_shard: bool) -> tuple[Any, bool]:
    """Return the model with a scalar head, and whether the folder had that head; a new head is zero."""
    model, missing = load_pretrained(auto_class, model_path, what=what, by_shard=by_shard, num_labels=1)
    body = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if body:
        raise ConfigError(
            f"model_path {model_path!r} has no weights for {body[:4]}: give the folder of a complete model"
        )
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
    return model, not any(name.endswith("weight") for name in missing)


def load_pretrained(
    auto_class: Any, model_path: str, *, what: str, by_shard: bool = False, **options: Any
) -> tuple[Any, list[str]]:
    """Return the model in float32 and the names of weights that the folder lacks. With ``by_shard`` several ranks get
    it empty where that is possible; :func:`areal_lite.models.parallel.sharding.shard` then fills it."""
    if is_hub_name(model_path):
        check_hub_name(model_path)
    check_scorable(model_path)
    if by_shard and Ranks.current().size > 1 and (empty := empty_model(auto_class, model_path, **options)) is not None:
        return empty
    try:
        with quiet_transformers():
            model, report = auto_class.from_pretrained(
                model_path, dtype=torch.float32, output_loading_info=True, use_safetensors=True, **options
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(
            f"model_path {model_path!r} cannot be loaded as a {what} ({reason}): "
            "give a folder with config.json and model.safetensors, or a hub name"
        ) from error
    return model, sorted(report["missing_keys"])


def check_mesh(model_path: str, trainer: LearnerConfig) -> None:
    """Raise ConfigError unless ``trainer``'s ranks can divide a model's heads and layers, by its config alone."""
    config, name = stored_config(model_path), f"model_path {model_path!r}"
    if "vision_config" in config:
        refuse_images(trainer.tp_size, name)
    if trainer.tp_size > 1 and config.get("model_type") in CONFIG_MAPPING:
        refuse_plan(AutoConfig.for_model(**config).get_text_config(), trainer.tp_size, name)
    refuse_heads(config.get("text_config", config).get("num_attention_heads"), trainer.sp_size, trainer.tp_size, name)


def check_scorable(model_path: str, *, key: str = "model_path") -> None:
    """Raise ConfigError, naming ``key``, if the trainer cannot compute a model's log-probs, by its config alone."""
    config = stored_config(model_path)
    kind = str(config.get("model_type"))
    name = "falcon with alibi" if kind == "falcon" and config.get("alibi") else kind
    if name in _NOT_SCORABLE:
        raise ConfigError(
            f"{key} {model_path!r} is a {name} model, {_NOT_SCORABLE[name]}, so the trainer cannot compute its "
            "log-probs: choose a model of another architecture"
        )


def prepare(model: Any, *, device: torch.device, gradient_checkpointing: bool) -> Any:
    """Switch off dropout, optionally enable activation checkpointing, and return the model on ``device``. With dropout,
    two passes over the same tokens would differ, and their ratio would be noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):  # that a layer passes to a function
                setattr(module, name, 0.0)
    model.train(gradient_checkpointing)  # transformers recomputes activations in training mode only
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model if is_empty(model) else model.to(device)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from drawing progress bars at each published version, and from reporting weights: those that
    are missing are checked here, and unused ones do not matter."""
    enabled, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def resolve_device(device: str, *, key: str = "trainer.device") -> torch.device:
    """Return the torch device for ``auto``, ``cpu`` or ``cuda``; ``key`` is the config key, for errors."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{key} is 'cuda' but torch sees no GPU: use 'auto', or install torch for CUDA")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of ``auto``, ``float32``, ``bfloat16`` or ``float16``. auto is bfloat16, or float32 on a
    CPU without instructions for bfloat16, where bfloat16 is several times slower."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type != "cpu" or has_bfloat16() else "float32"
        if dtype == "float32":
            logger.info("this CPU has no instructions for bfloat16, so dtype auto is float32")
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved


@functools.cache
def has_bfloat16() -> bool:
    """Return whether this CPU has instructions for products in bfloat16, as far as Linux tells."""
    return CPU_INFO.exists() and bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", CPU_INFO.read_text()))
