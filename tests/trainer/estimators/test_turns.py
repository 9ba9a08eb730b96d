"""Estimators that compare turns: by hand and by property."""

from __future__ import annotations
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from areal_lite.errors import ConfigError
from areal_lite.trainer.estimators import COMPARES_GROUP, ESTIMATORS, EstimatorInputs
from areal_lite.trainer.estimators.advantage_estimators import STD_FLOOR
from tests.trainer.turn_data import (
    Episode,
    RewardedTurn,
    line,
    make_turn_step,
    turn_episodes,
    with_whole_turns,
)

NAMES = ["turn_grpo", "turn_returns"]
FORK = [RewardedTurn(1, 0), RewardedTurn(0, 1, 0), RewardedTurn(4, 1, 0)]
"""A first turn that was continued in two ways."""


def run(name: str, step: EstimatorInputs, **options: Any) -> Tensor:
    result: Tensor = ESTIMATORS[name](step, **options).advantages
    return result


def per_turn(name: str, step: EstimatorInputs, **options: Any) -> list[float]:
    """Return the advantage of each turn; its tokens have the same."""
    assert step.turns is not None
    advantages, of_token = run(name, step, **options), step.turns.of_token
    values = [advantages[of_token == turn] for turn in range(len(step.turns.rewards))]
    assert all((own == own[0]).all() for own in values)
    return [own[0].item() for own in values]


def test_turns_are_compared_at_the_same_index() -> None:
    step = make_turn_step([("a", line(1, 0)), ("a", line(0, 1)), ("a", line(0))])
    third, half = 3**0.5 / 3, 0.5**0.5
    assert per_turn("turn_grpo", step) == pytest.approx([2 * third, -half, -third, half, -third], abs=1e-5)
    centred = [2 / 3, -1 / 2, -1 / 3, 1 / 2, -1 / 3]
    assert per_turn("turn_grpo", step, divide_by_std=False) == pytest.approx(centred)


def test_other_groups_do_not_change_advantages() -> None:
    own: list[Episode] = [("a", line(1, 0)), ("a", line(0, 1))]
    alone = per_turn("turn_grpo", make_turn_step(own))
    assert per_turn("turn_grpo", make_turn_step([*own, ("b", line(9, 9)), ("b", line(3))]))[:4] == alone


def test_a_baseline_counts_an_episode_once_however_often_it_forked() -> None:
    """Index 1: rewards 0 and 1 of one episode, 1 of the other; the baseline is 3/4."""
    tree = [RewardedTurn(1, 0), RewardedTurn(0, 1, 0), RewardedTurn(1, 1, 0)]
    step = make_turn_step([("a", tree), ("a", line(1, 1))])
    assert per_turn("turn_grpo", step, divide_by_std=False) == [0, -0.75, 0.25, 0, 0.25]
    # variance: (mean of 0.75^2 and 0.25^2) + 0.25^2 = 0.375
    expected = [0, -0.75 / 0.375**0.5, 0.25 / 0.375**0.5, 0, 0.25 / 0.375**0.5]
    assert per_turn("turn_grpo", step) == pytest.approx(expected, abs=1e-5)


def test_continuations_of_one_episode_alone_are_divided_by_their_own_deviation() -> None:
    """The episodes' means are equal at 1/2; dividing by the deviation of the means would give half a million."""
    tree = [RewardedTurn(0, 0), RewardedTurn(0, 1, 0), RewardedTurn(1, 1, 0)]
    step = make_turn_step([("a", tree), ("a", line(0, 0.5))])
    assert per_turn("turn_grpo", step) == pytest.approx([0, -1, 1, 0, 0], abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_episode_at_an_index_and_equal_values_give_exactly_0(name: str, dtype: torch.dtype) -> None:
    """The mean of equal floats need not equal them."""
    step = make_turn_step([("a", line(0.1)), ("a", line(0.1)), ("a", line(0.1))], dtype)
    assert run(name, step).tolist() == [0, 0, 0]
    forked = make_turn_step([("a", FORK), ("a", line(2)), ("b", line(5, 3))], dtype)
    ours = per_turn(name, forked)
    assert ours[1:3] == [0, 0]
    assert ours[4:] == [0, 0]
    assert run(name, forked).dtype == dtype


def test_a_return_adds_the_mean_of_its_continuations() -> None:
    """The fork earns 1 + 0.5 * (0 + 4) / 2 = 2 at index 0, the line 1 + 0.5 * (2 + 0.5 * 6) = 3.5."""
    step = make_turn_step([("a", FORK), ("a", line(1, 2, 6))])
    ours = per_turn("turn_returns", step, gamma=0.5, divide_by_std=False)
    # index 1: 0 and 4, mean 2, against 5
    assert ours == pytest.approx([-0.75, -3.5, 0.5, 0.75, 1.5, 0])


def test_a_return_skips_calls_without_a_reward() -> None:
    """The second turn is the third call; it is discounted once."""
    step = make_turn_step([("a", [RewardedTurn(0, 0), RewardedTurn(4, 2, 0)]), ("a", line(0))])
    assert per_turn("turn_returns", step, gamma=0.5, divide_by_std=False) == [1, 0, -1]


def test_a_kl_penalty_lowers_the_reward_of_its_turn() -> None:
    step = make_turn_step([("a", line(1, 0)), ("a", line(1, 1))])
    penalised = replace(step, token_rewards=step.token_rewards - torch.tensor([0.5, 0.0, 0.0, 0.25]))
    assert per_turn("turn_grpo", penalised, divide_by_std=False) == [-0.25, -0.375, 0.25, 0.375]


def by_loops(episodes: list[Episode], gamma: float) -> list[float]:
    """Return ``turn_returns`` of each turn, straight from its definition."""

    def turn_return(own: Sequence[RewardedTurn], place: int) -> float:
        later = [turn_return(own, child) for child, turn in enumerate(own) if turn.parent == place]
        return own[place].reward + (gamma * sum(later) / len(later) if later else 0.0)

    values = [[turn_return(own, place) for place in range(len(own))] for _, own in episodes]
    result = []
    for number, (group, own) in enumerate(episodes):
        for place, turn in enumerate(own):
            there = [
                [value for value, one in zip(values[other], turns, strict=True) if one.index == turn.index]
                for other, (name, turns) in enumerate(episodes)
                if name == group
            ]
            there = [one for one in there if one]
            if len(there) < 2:
                result.append(0.0)
                continue
            baseline = mean(mean(one) for one in there)
            variance = sum(mean((value - baseline) ** 2 for value in one) for one in there) / (len(there) - 1)
            result.append((values[number][place] - baseline) / (variance**0.5 + STD_FLOOR))
    return result


@given(turn_episodes, st.sampled_from([0.0, 0.5, 1.0]))
@settings(deadline=None, max_examples=80)
def test_any_forest_matches_the_definition(episodes: list[Episode], gamma: float) -> None:
    step = make_turn_step(episodes)
    assert step.turns is not None
    expected = torch.tensor(by_loops(episodes, gamma), dtype=torch.float64)[step.turns.of_token]
    torch.testing.assert_close(run("turn_returns", step, gamma=gamma), expected, rtol=1e-6, atol=1e-6)


@given(turn_episodes, st.booleans())
@settings(deadline=None, max_examples=80)
def test_with_a_discount_of_0_turn_returns_equal_turn_grpo(episodes: list[Episode], divide: bool) -> None:
    step = make_turn_step(episodes)
    ours = run("turn_returns", step, gamma=0.0, divide_by_std=divide)
    assert torch.equal(ours, run("turn_grpo", step, divide_by_std=divide))


@given(turn_episodes, st.randoms(use_true_random=False), st.sampled_from([0.5, 1.0]))
@settings(deadline=None, max_examples=80)
def test_the_order_of_episodes_does_not_matter(episodes: list[Episode], random: Any, gamma: float) -> None:
    order = list(range(len(episodes)))
    random.shuffle(order)
    step, shuffled = make_turn_step(episodes), make_turn_step([episodes[place] for place in order])
    before, after = (run("turn_returns", one, gamma=gamma, divide_by_std=False) for one in (step, shuffled))
    expected = torch.cat([before[step.episodes == place] for place in order])
    torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)


@given(turn_episodes)
@settings(deadline=None, max_examples=80)
def test_advantages_at_an_index_sum_to_0_over_the_episodes_of_a_group(episodes: list[Episode]) -> None:
    step = make_turn_step([(group, [turn._replace(num_tokens=1) for turn in own]) for group, own in episodes])
    assert step.turns is not None
    ours = run("turn_returns", step, divide_by_std=False)
    for group in set(step.group_ids):
        for index in set(step.turns.index.tolist()):
            means = [
                ours[here].mean().item()
                for episode, name in enumerate(step.group_ids)
                if name == group
                and bool((here := (step.turns.episodes == episode) & (step.turns.index == index)).any())
            ]
            assert abs(sum(means)) < 1e-9


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.sampled_from("ab"), st.integers(0, 3)), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from([0.0, 0.1]),
)
@settings(deadline=None, max_examples=80)
def test_with_one_turn_per_episode_both_are_grpo(
    drawn: list[tuple[int, str, int]], divide: bool, penalty: float
) -> None:
    step = make_turn_step([(group, [RewardedTurn(score / 7, 0, -1, count)]) for score, group, count in drawn])
    step = replace(step, token_rewards=step.token_rewards - penalty * torch.arange(len(step.episodes)))
    for name in NAMES:
        ours, theirs = (run(which, step, divide_by_std=divide) for which in (name, "grpo"))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        assert torch.equal(ours, run(name, with_whole_turns(step), divide_by_std=divide))


@pytest.mark.parametrize("name", NAMES)
def test_missing_turn_rewards_are_an_error(name: str) -> None:
    step = replace(make_turn_step([("a", line(1)), ("a", line(0))]), turns=None)
    with pytest.raises(ConfigError, match="the estimator needs the rewards of turns"):
        run(name, step)
    assert name in COMPARES_GROUP
