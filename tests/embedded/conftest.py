from __future__ import annotations
from pathlib import Path
import pytest
from tests.fixtures.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of the same architecture with other weights."""
    return build_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
