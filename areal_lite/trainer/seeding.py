"""Random seeds and generator states, CPU threads and determinism of the training process."""

import os
import random
from typing import Any
import numpy as np
import torch
from areal_lite.config.trainer_config import LearnerConfig


def trainer_threads(config: LearnerConfig) -> int:
    """Return the CPU threads of a trainer: the config's, else its share of the machine's cores."""
    return config.num_threads or max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def seed_process(seed: int, *, num_threads: int = 0, deterministic: bool = False) -> None:
    """Seed python, numpy and torch; ``num_threads`` 0 leaves torch's choice. Call this before a GPU is used."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if num_threads:
        torch.set_num_threads(num_threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)


def rng_state() -> dict[str, Any]:
    """Return the states of python, numpy and torch, and of the current GPU if torch uses one, as JSON values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restore the states that :func:`rng_state` returned; a GPU's state is ignored on a machine without one."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _tensor(state: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8)
