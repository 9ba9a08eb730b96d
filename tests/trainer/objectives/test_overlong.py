"""DAPO's penalty on answers near the length limit."""

from __future__ import annotations
import pytest
import torch
from areal_lite.errors import ConfigError
from areal_lite.trainer.rl.algorithm import overlong_penalty


def test_the_penalty_is_linear_within_the_buffer() -> None:
    penalty = overlong_penalty(torch.tensor([0, 6, 7, 8, 10, 12]), max_length=10, buffer=4)
    assert penalty.tolist() == [0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(torch.tensor([9, 10]), max_length=10, buffer=1).tolist() == [0, -1]


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_outside_1_to_the_limit_is_an_error(buffer: int) -> None:
    with pytest.raises(ConfigError, match=f"overlong buffer is {buffer}: choose 1 to 10 tokens"):
        overlong_penalty(torch.tensor([1]), max_length=10, buffer=buffer)
