"""The trainers of a machine divide its cores; a server has all of them, too, or half if it runs beside them."""

from __future__ import annotations
import os
from pathlib import Path
import pytest
from areal_lite.config.loader import load_config
from areal_lite.runs.engine_stack import ThreadBudget, thread_budget

YAML = """
experiment_name: e
model_path: m
workflow: my.Agent
train_dataset: {path: rows.jsonl}
trainer: {total_steps: 1, learning_rate: 1.0}
"""


@pytest.mark.parametrize(
    ("staleness", "ranks", "budget"),
    [
        (0, None, ThreadBudget(server=8, trainer=8)),  # they take turns
        (0, "4", ThreadBudget(server=8, trainer=2)),
        (1, None, ThreadBudget(server=4, trainer=8)),
        (1, "2", ThreadBudget(server=4, trainer=4)),
        (1, "16", ThreadBudget(server=4, trainer=1)),
    ],
)
def test_the_trainers_of_a_machine_divide_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, ranks: str | None, budget: ThreadBudget
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    (tmp_path / "run.yaml").write_text(YAML)
    config = load_config(tmp_path / "run.yaml", [f"rollout.max_head_offpolicyness={staleness}"])
    assert thread_budget(config) == budget
