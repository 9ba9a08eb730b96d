"""Settings of all tests, and the model and server that most runs of tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from areal_lite.embedded import EmbeddedServer
from tests.fixtures.tiny_model import build_tiny_model

# A loaded machine is no bug; pytest-timeout bounds each test.
settings.register_profile("areal_lite", deadline=None)
settings.load_profile("areal_lite")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[str]:
    """Return the address of a server of the tiny model, for runs that need none of their own: each publishes its first
    weights there. To start one takes longer than to train.
    """
    with EmbeddedServer(model_path=str(tiny_model), dtype="float32", num_threads=1, device="cpu") as server:
        yield server.address
