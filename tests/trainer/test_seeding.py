from __future__ import annotations
import os
from collections.abc import Iterator
import numpy as np
import pytest
import torch
from areal_lite.trainer.seeding import restore_rng_state, rng_state, seed_process

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


def test_threads_stay_as_they_are_unless_their_number_is_given() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        seed_process(1)
        assert torch.get_num_threads() == 2
        seed_process(1, num_threads=3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_numpy_takes_the_lowest_32_bits_of_a_seed() -> None:
    def drawn(seed: int) -> float:
        seed_process(seed)
        return float(np.random.rand())

    assert drawn(2**32 + 5) == drawn(5)
    assert len({drawn(seed) for seed in (5, 5 + 64, 2**32 - 1)}) == 3


def test_deterministic_mode_enables_deterministic_algorithms() -> None:
    seed_process(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ[WORKSPACE] == ":4096:8"


def test_a_users_workspace_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    seed_process(1, deterministic=True)
    assert os.environ[WORKSPACE] == ":16:8"


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_gpus_generator_is_restored_on_a_machine_with_one(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([7, 255], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    state = rng_state()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    restore_rng_state(state)
    assert [each.tolist() for each in restored] == [[7, 255]] * has_gpu


def test_a_state_from_a_machine_without_a_gpu_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = rng_state()
    drawn = torch.rand(3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    restore_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
