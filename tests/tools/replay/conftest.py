"""A run of the tiny model that was trained once; tests only read it."""

from __future__ import annotations
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_training


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Return the folder of a reward model."""
    folder = tmp_path_factory.mktemp("judge")
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def run_yaml(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_server: str) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    config: dict[str, Any] = {
        "experiment_name": "e",
        "trial_name": "plain",
        "fileroot": str(folder / "runs"),
        "model_path": str(tiny_model),
        "workflow": "tests.tools.replay.agents.TwoCallsAgent",
        "train_dataset": {"path": "tests.tools.replay.agents.rows"},
        "rollout": {
            "group_size": 3,
            "consumer_batch_size": 2,
            "dump_to_file": True,
            "addresses": [tiny_server],
            "gconfig": {"max_new_tokens": 5},
        },
        "server": {"dtype": "float32", "num_threads": 1, "device": "cpu"},
        "trainer": {
            **{"total_steps": 3, "learning_rate": 5.0e-3, "dtype": "float32"},
            **{"num_threads": 1, "device": "cpu", "deterministic": True},
        },
        "checkpoint": {"every_minutes": None},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session")
def plain_run(run_yaml: Path) -> Path:
    """Return the folder of an on-policy GRPO run."""
    return run_training(load_config(run_yaml)).run_dir


@pytest.fixture(autouse=True)
def undo_determinism() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
