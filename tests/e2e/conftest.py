"""The YAML that trains the tiny model."""

from __future__ import annotations
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import pytest
import torch
import yaml


@pytest.fixture(autouse=True)
def undo_determinism() -> Iterator[None]:
    """Reset what a run with ``trainer.deterministic`` sets for the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run_yaml(tmp_path: Path, tiny_model: Path) -> Path:
    config: dict[str, Any] = {
        "experiment_name": "e2e",
        "trial_name": "t",
        "fileroot": str(tmp_path / "runs"),
        "model_path": str(tiny_model),
        "workflow": "tests.e2e.agents.LetterAgent",
        "train_dataset": {"path": "tests.e2e.agents.rows"},
        "eval_dataset": {"path": "tests.e2e.agents.rows", "kwargs": {"size": 4}},
        "rollout": {
            "group_size": 4,
            "consumer_batch_size": 4,
            "dump_to_file": True,
            "gconfig": {"max_new_tokens": 8},
            "eval_gconfig": {"max_new_tokens": 8, "greedy": True},
        },
        "server": {"dtype": "float32", "num_threads": 1, "device": "cpu"},
        "trainer": {
            "total_steps": 4,
            "learning_rate": 5.0e-3,
            "dtype": "float32",
            "num_threads": 1,
            "device": "cpu",
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def served_yaml(run_yaml: Path, tiny_server: str) -> Path:
    """Return the YAML of a run on the shared server, which starts in half the time."""
    config = yaml.safe_load(run_yaml.read_text())
    config["rollout"]["addresses"] = [tiny_server]
    run_yaml.write_text(yaml.safe_dump(config))
    return run_yaml
