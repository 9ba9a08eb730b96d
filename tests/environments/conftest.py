"""What tests of configs with environments share."""

from __future__ import annotations
from pathlib import Path
from typing import Any
import pytest
import yaml
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import RunConfig


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Return a function that loads a config with these values beside what every run needs."""

    def load(*overrides: str, root: Any = RunConfig, **values: Any) -> Any:
        path = tmp_path / "run.yaml"
        base = {"experiment_name": "e", "model_path": "m", "trainer": {"total_steps": 1, "learning_rate": 1e-5}}
        path.write_text(yaml.safe_dump(base | values))
        return load_config(path, overrides, root=root)

    return load
