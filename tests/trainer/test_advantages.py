from __future__ import annotations

import time

import numpy as np
import pytest

from areal_lite.trainer.advantages import group_advantages
from tests.trainer.oracle import oracle


def test_rewards_are_centred_on_their_group_and_divided_by_its_unbiased_deviation() -> None:
    # a: mean 0.5, deviation sqrt(1/3) = 0.5774; b: mean 3, deviation sqrt(2) = 1.4142
    result = group_advantages([1, 0, 2, 0, 4, 1], ["a", "a", "b", "a", "b", "a"])
    np.testing.assert_allclose(result, [0.8660, -0.8660, -0.7071, -0.8660, 0.7071, 0.8660], atol=1e-4)


def test_without_deviation_the_centred_reward_is_the_advantage() -> None:
    np.testing.assert_allclose(group_advantages([1, 0, 5], ["a", "a", "a"], divide_by_std=False), [-1, -2, 3])


@pytest.mark.parametrize("divide", [True, False])
def test_groups_that_say_nothing_get_exactly_zero(divide: bool) -> None:
    result = group_advantages([7.0, 0.1, 0.1, 0.1], ["alone", "same", "same", "same"], divide_by_std=divide)
    assert result.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_large_close_rewards_keep_their_difference() -> None:
    result = group_advantages([10000.0, 10000.1, 10000.2, 10000.3], ["a"] * 4)
    np.testing.assert_allclose(result, [-1.1619, -0.3873, 0.3873, 1.1619], atol=1e-3)


@pytest.mark.parametrize("divide", [0, 1])
def test_verl_computes_the_same_but_for_its_singleton_group(divide: int) -> None:
    groups = oracle("in/group").tolist()
    rewards = oracle("in/rewards_outcome").sum(1).numpy()
    expected = (oracle(f"out/adv.grpo.std{divide}.rewards_outcome.mask/advantages"))[:, 0].numpy()
    several = np.array([groups.count(group) > 1 for group in groups])
    ours = group_advantages(rewards, [str(group) for group in groups], divide_by_std=bool(divide))
    np.testing.assert_allclose(ours[several], expected[several], atol=1e-9)
    assert (ours[~several] == 0).all()


def test_a_missing_group_id_is_named() -> None:
    with pytest.raises(ValueError, match="2 rewards but 1 group ids"):
        group_advantages([1.0, 2.0], ["a"])


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="rewards hold nan"):
        group_advantages([1.0, float("nan")], ["a", "a"])


def test_eight_thousand_rewards_take_less_than_20_ms_of_one_core() -> None:
    rewards = np.random.default_rng(0).normal(size=8192)
    ids = [f"group-{i % 1024}" for i in range(8192)]
    best = min(_cpu_seconds(rewards, ids) for _ in range(5))
    assert best < 0.020


def _cpu_seconds(rewards: np.ndarray, ids: list[str]) -> float:
    began = time.thread_time()
    group_advantages(rewards, ids)
    return time.thread_time() - began
