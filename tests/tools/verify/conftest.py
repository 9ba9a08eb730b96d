"""One sound run of the tiny model, trained once; tests copy it."""

from __future__ import annotations
import shutil
from pathlib import Path
from typing import Any
import pytest
import torch
import yaml
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_training


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def run_yaml(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_server: str) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    config: dict[str, Any] = {
        "experiment_name": "sound",
        "trial_name": "t",
        "fileroot": str(folder / "runs"),
        "model_path": str(tiny_model),
        "workflow": "tests.e2e.agents.LetterAgent",
        "train_dataset": {"path": "tests.e2e.agents.rows"},
        "eval_dataset": {"path": "tests.e2e.agents.rows", "kwargs": {"size": 4}},
        "rollout": {
            "addresses": [tiny_server],
            "group_size": 4,
            "consumer_batch_size": 4,
            "dump_to_file": True,
            "weight_update": "disk",
            "gconfig": {"max_new_tokens": 8},
            "eval_gconfig": {"max_new_tokens": 8, "greedy": True},
        },
        "server": {"dtype": "float32", "num_threads": 1, "device": "cpu"},
        "trainer": {
            **{"total_steps": 3, "learning_rate": 5.0e-3, "dtype": "float32"},
            **{"num_threads": 1, "device": "cpu", "deterministic": True},
        },
        "checkpoint": {"every_steps": 1},
        "evaluation": {"every_steps": 2},
        "dump_training": True,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session")
def sound_run(run_yaml: Path) -> Path:
    """Return the folder of a sound run, which nobody may change."""
    try:
        return run_training(load_config(run_yaml)).run_dir
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def run(sound_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the sound run."""
    return shutil.copytree(sound_run, tmp_path / "copy" / "t")
