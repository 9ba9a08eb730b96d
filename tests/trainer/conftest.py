from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fixtures.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with tied embeddings."""
    torch.set_num_threads(1)
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("untied"), seed=1, tied=False)
