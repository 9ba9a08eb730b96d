"""The tiny random model, built once for all examples."""

import pytest
from tests.fixtures.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), context=512)
