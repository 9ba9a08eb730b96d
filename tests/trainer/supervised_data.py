"""Items to train on, drawn from a seed, and trainers of a tiny model."""

from __future__ import annotations
from collections.abc import Callable
from pathlib import Path
from typing import Any
import numpy as np
import torch
from areal_lite.config.supervised_config import DPOTrainerConfig, RewardModelTrainerConfig, SFTTrainerConfig
from areal_lite.trainer.supervised.preference_trainer import DPOTrainer, RewardModelTrainer
from areal_lite.trainer.supervised.supervised_trainer import SFTTrainer
from tests.trainer.training_data import VOCABULARY

Item = dict[str, torch.Tensor]
COMMON: dict[str, Any] = {
    "batch_size": 8, "learning_rate": 1e-3, "lr_schedule": "constant", "dtype": "float32", "device": "cpu",
    "num_threads": 1,
}  # fmt: skip


def sft_trainer(model: Path, *, total_steps: int = 10, on_skip: Any = None, **options: Any) -> SFTTrainer:
    config = SFTTrainerConfig(**COMMON | options)
    return SFTTrainer(config, model_path=str(model), seed=0, total_steps=total_steps, on_skip=on_skip)


def dpo_trainer(model: Path, **options: Any) -> DPOTrainer:
    return DPOTrainer(DPOTrainerConfig(**COMMON | options), model_path=str(model), seed=0, total_steps=10)


def reward_trainer(model: Path, **options: Any) -> RewardModelTrainer:
    config = RewardModelTrainerConfig(**COMMON | options)
    return RewardModelTrainer(config, model_path=str(model), seed=0, total_steps=10)


def sequences(seed: int, count: int, *, common: int = 0) -> list[Item]:
    """Return conversations of two turns of random ids behind ``common`` ids that are the same in all."""
    rng = np.random.default_rng(seed)
    system = rng.integers(3, VOCABULARY, common)
    items = []
    for row in range(count):
        spans = rng.integers(1, 12, 4)
        mask = np.repeat([0, 0, 1, 0, 1], [common, *spans])
        ids = np.concatenate([system, rng.integers(3, VOCABULARY, spans.sum())])
        items.append(
            {
                "input_ids": torch.from_numpy(ids),
                "loss_mask": torch.from_numpy(mask),
                "row": torch.tensor(row),
            }
        )
    return items


def pairs(seed: int, count: int) -> list[Item]:
    """Return pairs with a common prompt."""
    rng = np.random.default_rng(seed)
    items = []
    for row in range(count):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 30))
        item: Item = {"row": torch.tensor(row)}
        for name in ("chosen", "rejected"):
            answer = rng.integers(3, VOCABULARY, rng.integers(1, 10))
            item[f"{name}_ids"] = torch.from_numpy(np.concatenate([prompt, answer]))
            item[f"{name}_mask"] = torch.from_numpy(np.repeat([0, 1], [len(prompt), len(answer)]))
        items.append(item)
    return items


def gradients(trainer: SFTTrainer | DPOTrainer | RewardModelTrainer) -> dict[str, torch.Tensor]:
    """Return the gradients that the last update left."""
    return {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }


def run_out_of_memory(module: torch.nn.Module, error: Callable[[], object], *, above: int) -> None:
    """Have ``error`` raise in every forward pass of more than ``above`` tokens."""

    def refuse(_: Any, arguments: tuple[Any, ...]) -> None:
        if arguments[0].input_ids.numel() > above:
            error()

    module.register_forward_pre_hook(refuse)
