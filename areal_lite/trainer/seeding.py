"""Random seeds and CPU threads of the training process, set in one place."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_process(seed: int, *, num_threads: int = 0) -> None:
    """Seed python, numpy and torch, and give torch ``num_threads`` CPU threads (0 leaves its own choice)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if num_threads:
        torch.set_num_threads(num_threads)
