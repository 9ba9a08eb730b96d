from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from areal_lite.trainer.seeding import seed_process

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    yield
    torch.use_deterministic_algorithms(False)


def test_determinism_is_off_unless_it_is_asked_for() -> None:
    seed_process(1)
    assert not torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE not in os.environ


def test_deterministic_refuses_what_differs_between_runs() -> None:
    seed_process(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ[WORKSPACE] == ":4096:8"


def test_a_workspace_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    seed_process(1, deterministic=True)
    assert os.environ[WORKSPACE] == ":16:8"
