"""Loading a Hugging Face causal LM to be trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from areal_lite.errors import ConfigError


def load_policy(model_path: str, *, device: torch.device, gradient_checkpointing: bool = False) -> Any:
    """Return the model in float32 on ``device``, without dropout, ready for backward passes.

    Raises:
        ConfigError: If ``model_path`` is no model folder and no model the hub or its cache gives.
    """
    path = Path(model_path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"model_path {model_path!r} has no config.json: name the folder of a Hugging Face causal LM "
            f"(config.json, model.safetensors, tokenizer files); it holds {sorted(p.name for p in path.iterdir())[:8]}"
        )
    try:
        with without_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model_path {model_path!r} cannot be loaded as a causal LM ({_first_line(error)}): "
            "give a folder with config.json and model.safetensors, or a hub name"
        ) from error
    _switch_off_dropout(model)
    model.train(gradient_checkpointing)  # transformers recomputes activations in training mode only
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(device)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars on stderr, once per published version."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def resolve_device(device: str) -> torch.device:
    """Return the device that ``auto``, ``cpu`` or ``cuda`` means here.

    Raises:
        ConfigError: If it says ``cuda`` and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device is 'cuda' but torch sees no GPU: use 'auto' or 'cpu', or install torch for CUDA"
        )
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def _switch_off_dropout(model: nn.Module) -> None:
    """With dropout, two passes over the same tokens would be two policies, and their ratio noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 -- a plain attribute of HF attention


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
