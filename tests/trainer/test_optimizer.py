from __future__ import annotations
import ctypes
import subprocess
import sys
from typing import Any, Literal
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import get_scheduler
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.trainer.learner import learning_rate, make_optimizer
from tests.fork_server import IN_A_FORK


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"total_steps": 6, "learning_rate": 1.0} | changes)


def rates(**changes: Any) -> list[float]:
    return [learning_rate(config(**changes), step, 6) for step in range(6)]


def test_the_learning_rate_warms_up_and_then_follows_its_schedule() -> None:
    assert rates(warmup_steps=2) == pytest.approx([0, 0.5, 1, 1, 1, 1])
    assert rates(warmup_steps=2, lr_schedule="linear") == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25])
    assert rates(lr_schedule="cosine") == pytest.approx([1, 0.933, 0.75, 0.5, 0.25, 0.067], abs=1e-3)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@given(total=st.integers(1, 60), warmup=st.integers(0, 70))
def test_the_learning_rate_equals_that_of_transformers(
    schedule: Literal["constant", "linear", "cosine"], total: int, warmup: int
) -> None:
    # R20
    name = "constant_with_warmup" if schedule == "constant" else schedule
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3.0)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    options = config(learning_rate=3.0, lr_schedule=schedule, warmup_steps=warmup)
    for step in range(total):
        assert learning_rate(options, step, total) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_the_learning_rate_stays_at_0_after_the_last_step() -> None:
    assert learning_rate(config(lr_schedule="linear"), 9, 6) == 0.0
    assert learning_rate(config(lr_schedule="linear", warmup_steps=5), 6, 6) == 0.0


def test_norms_and_biases_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(model, config(weight_decay=0.1))
    assert optimizer.defaults["fused"]
    decaying, free = optimizer.param_groups
    assert (len(decaying["params"]), decaying["weight_decay"]) == (1, 0.1)
    assert (len(free["params"]), free["weight_decay"]) == (3, 0.0)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_a_process_that_trains_on_a_cpu_keeps_the_memory_it_frees() -> None:
    program = f"""{IN_A_FORK}
import resource, torch
from areal_lite.config.trainer_config import LearnerConfig
from areal_lite.trainer.learner import Learner
def faults(size=50_000_000):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(size, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
config = LearnerConfig(learning_rate=0.5)
Learner(torch.nn.Linear(2, 2), config, config, total_steps=1)
faults(80_000_000)  # the heap has more room than a block needs
print(before, faults())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = map(int, run.stdout.split())
    assert before > 40_000
    assert after < 1_000
