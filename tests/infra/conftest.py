"""Workflows and engines for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from areal_lite.api import InferenceEngineConfig
from areal_lite.infra import reconciler, server_pool
from areal_lite.infra.remote_inf_engine import RemoteInfEngine
from tests.stub_server import StubServer, StubThread

MakeEngine = Callable[..., RemoteInfEngine]


@pytest.fixture(autouse=True)
def _short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that failed are probed at once, not after seconds."""
    monkeypatch.setattr(server_pool, "FIRST_REST_S", 0.01)
    monkeypatch.setattr(reconciler, "WATCH_S", 0.01)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_stub(stack: ExitStack) -> Callable[..., StubThread]:
    def start(**kwargs: Any) -> StubThread:
        return stack.enter_context(StubThread(StubServer(**kwargs)))

    return start


@pytest.fixture
def start_engine(stack: ExitStack, tmp_path: Path) -> MakeEngine:
    def start(*stubs: StubThread, model_path: str | None = None, **kwargs: Any) -> RemoteInfEngine:
        config = InferenceEngineConfig(
            backend="sglang", addresses=[s.address for s in stubs], fileroot=str(tmp_path), **kwargs
        )
        return stack.enter_context(RemoteInfEngine(config, model_path=model_path))

    return start
