"""V59, V-B13: a run saves once in time before its machine expires."""

from __future__ import annotations
import pytest
from areal_lite.errors import ConfigError
from areal_lite.runs.stopping import expires_soon

NAMES = [
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_save_window_is_one_step_plus_a_margin_before_the_machine_ends(name: str) -> None:
    def soon(now: float) -> bool:
        return expires_soon({name: "1000"}, now, margin_s=60, longest_step_s=40)

    assert [soon(now) for now in (899.9, 900, 999.9, 1000, 5000)] == [False, True, True, False, False]


def test_it_saves_once_per_window() -> None:
    saved_at: float | None = 850.0  # a periodic checkpoint from before
    saves = []
    for now in range(860, 1100, 20):
        if expires_soon({NAMES[0]: "1000"}, now, margin_s=60, longest_step_s=20, saved_at=saved_at):
            saves.append(now)
            saved_at = now
    assert saves == [920]
    assert expires_soon({NAMES[0]: "2000"}, 1930, margin_s=60, longest_step_s=20, saved_at=saved_at)  # lent anew


def test_machines_without_an_end_time_never_expire() -> None:
    assert not expires_soon({}, 0, margin_s=60, longest_step_s=1e9)
    assert not expires_soon({NAMES[0]: ""}, 0, margin_s=60, longest_step_s=1e9)


def test_a_time_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="SAGEMAKER.* is 'tomorrow'.*fix or unset"):
        expires_soon({NAMES[1]: "tomorrow"}, 0, margin_s=1, longest_step_s=1)
