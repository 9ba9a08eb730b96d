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


def test_determinism_is_off_by_default() -> None:
    seed_process(1)
    assert not torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE not in os.environ


def test_deterministic_mode_enables_deterministic_algorithms() -> None:
    seed_process(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ[WORKSPACE] == ":4096:8"


def test_a_users_workspace_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    seed_process(1, deterministic=True)
    assert os.environ[WORKSPACE] == ":16:8"
