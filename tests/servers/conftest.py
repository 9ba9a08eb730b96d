"""Real servers for the tests here: started by hand, named by the environment, see test_real_sglang.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.servers.contract")

from areal_lite.api import InferenceEngineConfig  # noqa: E402
from areal_lite.infra.remote_inf_engine import RemoteInfEngine  # noqa: E402
from areal_lite.trainer.weights import publish_weights  # noqa: E402
from tests.servers.real_server import Policy, RealServer, named_server  # noqa: E402


@pytest.fixture(scope="class")
def server(request: pytest.FixtureRequest) -> RealServer:
    """The server the environment names, serving the starting weights."""
    return named_server(request.cls.backend)


@pytest.fixture(scope="class")
def policy(server: RealServer) -> Policy:
    """The model the server started with, in float32."""
    return Policy(server.model)


@pytest.fixture(scope="class")
def perturbed(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The same model with 5 % noise, published the way the trainer publishes."""
    import torch

    other = Policy(policy.path)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    folder = publish_weights(other.model, tmp_path_factory.mktemp("weights"), 1)
    return Policy(folder)


@pytest.fixture
def config(server: RealServer, tmp_path: Path) -> dict[str, Any]:
    """What every engine here is made with."""
    return {
        "backend": server.backend,
        "addresses": [server.address],
        "fileroot": str(tmp_path),
        "tokenizer_path": str(server.model),
    }


@pytest.fixture
def engine(config: dict[str, Any]) -> Iterator[RemoteInfEngine]:
    """An engine on the server."""
    with RemoteInfEngine(InferenceEngineConfig(**config)) as engine:
        yield engine


@pytest.fixture
def restored(server: RealServer, config: dict[str, Any]) -> Iterator[None]:
    """Gives the server its starting weights back, as version 0, after the test."""
    yield
    with RemoteInfEngine(InferenceEngineConfig(**config)) as engine:
        engine.update_weights_from_disk(str(server.model), 0)
