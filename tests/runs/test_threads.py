"""The trainers of a machine divide its cores; its servers have all of them, too, or half if they run beside them."""

from __future__ import annotations
import os
from pathlib import Path
import pytest
from areal_lite.config.loader import load_config
from areal_lite.runs.engine_stack import server_threads
from areal_lite.trainer.seeding import trainer_threads

YAML = """
experiment_name: e
model_path: m
workflow: my.Agent
train_dataset: {path: rows.jsonl}
trainer: {total_steps: 1, learning_rate: 1.0}
"""


@pytest.mark.parametrize(
    ("staleness", "ranks", "server", "trainer"),
    [
        (0, None, 8, 8),  # they take turns
        (0, "4", 8, 2),
        (1, None, 4, 8),
        (1, "2", 4, 4),
        (1, "16", 4, 1),
    ],
)
def test_the_trainers_of_a_machine_divide_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, ranks: str | None, server: int, trainer: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    (tmp_path / "run.yaml").write_text(YAML)
    changes = [f"rollout.max_head_offpolicyness={staleness}"]
    config = load_config(tmp_path / "run.yaml", changes)
    assert (server_threads(config), trainer_threads(config.trainer)) == (server, trainer)
    config = load_config(tmp_path / "run.yaml", [*changes, "server.replicas=3"])
    assert server_threads(config) == server // 3
    config = load_config(tmp_path / "run.yaml", [*changes, "server.num_threads=5", "trainer.num_threads=6"])
    assert (server_threads(config), trainer_threads(config.trainer)) == (5, 6)
