"""AdamW with its parameter groups, and the learning-rate schedule as a pure function."""

from __future__ import annotations

import math

import torch
from torch import nn

from areal_lite.api.trainer_config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; norms and biases (one-dimensional) have no weight decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.adam_betas,
        eps=config.adam_eps,
        fused=True,
    )


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of the ``step``-th training step, counted from 0.

    It rises linearly from 0 over ``warmup_steps``, then is constant, or falls to 0 at ``total_steps`` linearly or as
    half a cosine, as in transformers' ``get_*_schedule_with_warmup``.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * step / warmup
    if config.lr_schedule == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return peak * (1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)
