"""Random seeds, CPU threads and determinism of the training process, set in one place."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_process(seed: int, *, num_threads: int = 0, deterministic: bool = False) -> None:
    """Seed python, numpy and torch, and give torch ``num_threads`` CPU threads (0 leaves its own choice).

    ``deterministic`` has torch refuse operations that are not bit for bit the same in every run; to be called before
    a GPU is used.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if num_threads:
        torch.set_num_threads(num_threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
