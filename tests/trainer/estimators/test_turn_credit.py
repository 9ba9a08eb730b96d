"""Rewards of turns against the true policy gradient of ten small MDPs; every possible group of episodes counts."""

from __future__ import annotations
import itertools
from dataclasses import replace
from typing import Any
import pytest
import torch
from torch import Tensor
from areal_lite.trainer.estimators import ESTIMATORS, Estimate, EstimatorInputs
from tests.trainer.small_mdps import MDP, MDPS, STOP_OR_GO, expected_update
from tests.trainer.turn_data import line, make_turn_step

EACH = pytest.mark.parametrize("mdp", MDPS.values(), ids=MDPS)
RAW: dict[str, Any] = {"divide_by_std": False}
EXACT: dict[str, tuple[dict[str, Any], float | None]] = {
    "dr_grpo": ({}, 3 / 4),
    "rloo": ({}, 1),
    "reinforce": ({}, 1),
    "reinforce_plus_plus_baseline": ({}, None),
}
"""Estimators whose expected update is the gradient: options, and its length in groups of four; None: about parallel."""


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


def signs(mdp: MDP, update: Tensor) -> dict[str, bool]:
    """Return whether the part of each state points the way of its part of the gradient."""
    found = {}
    for state in mdp.actions:
        places = [place for place, (other, _) in enumerate(mdp.parameters) if other == state]
        found[state] = float(update[places] @ mdp.gradient()[places]) > 0
    return found


def mean_of_turns(inputs: EstimatorInputs) -> Estimate:
    """Compare the means of the turns' rewards, as ``rollout.turn_rewards: mean`` does."""
    means = inputs.scores / inputs.lengths()
    rewards = torch.where(inputs.token_rewards != 0, means[inputs.episodes], 0.0)
    return ESTIMATORS["dr_grpo"](replace(inputs, scores=means, token_rewards=rewards))


def test_the_gradient_is_that_of_the_expected_return() -> None:
    """By differences of the return at logits that differ by a little."""
    for mdp in MDPS.values():
        logits = {state: list(mdp.logits.get(state, [0.0] * len(given))) for state, given in mdp.actions.items()}
        expected = []
        for state, action in mdp.parameters:
            values = []
            for change in (1e-5, -1e-5):
                moved = {name: list(own) for name, own in logits.items()}
                moved[state][action] += change
                paths = MDP(mdp.actions, moved).paths()
                assert sum(path.probability for path in paths) == pytest.approx(1)
                values.append(sum(path.probability * sum(step.reward for step in path.steps) for path in paths))
            expected.append((values[0] - values[1]) / 2e-5)
        torch.testing.assert_close(mdp.gradient(), torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=1e-6)


def test_to_stop_or_to_go_on_in_groups_of_eight() -> None:
    """Going on is worth 0.3 more. Of the gradient, 0.075, a baseline that counts the episode itself leaves 7/8."""
    go_on = [
        float(expected_update(STOP_OR_GO, estimator, group_size=8, **options)[1])
        for estimator, options in (
            (ESTIMATORS["dr_grpo"], {}),
            (ESTIMATORS["turn_returns"], RAW),
            (ESTIMATORS["rloo"], {}),
            (mean_of_turns, {}),
            (ESTIMATORS["turn_grpo"], RAW),
        )
    ]
    assert go_on == pytest.approx([0.065625, 0.065625, 0.075, -0.04375, -0.04375])
    assert expected_update(STOP_OR_GO, ESTIMATORS["grpo"], group_size=8)[1] > 0.1


@EACH
@pytest.mark.parametrize("gamma", [1.0, 0.6])
def test_turn_returns_follow_the_gradient_at_each_turn_index(mdp: MDP, gamma: float) -> None:
    """Of ``m`` episodes that reach an index, each is in its own baseline: (m - 1) / m of the gradient is left."""
    update = expected_update(mdp, ESTIMATORS["turn_returns"], group_size=4, gamma=gamma, **RAW)
    gradient, shares = mdp.gradient(gamma), []
    for block in mdp.blocks():
        shares.append(float(update[block] @ gradient[block] / gradient[block].square().sum()))
        torch.testing.assert_close(update[block], shares[-1] * gradient[block], atol=1e-12, rtol=1e-9)
    assert shares[0] == pytest.approx(3 / 4) and shares[-1] > 0.1
    assert all(later < earlier + 1e-9 for earlier, later in itertools.pairwise(shares))
    assert cosine(update, gradient) > 0.9


@EACH
@pytest.mark.parametrize("name", ["turn_returns", "grpo"])
def test_with_a_deviation_each_decision_still_points_the_right_way(mdp: MDP, name: str) -> None:
    """The direction is not the gradient's: a group of nearly equal rewards weighs as much as one that differs."""
    update = expected_update(mdp, ESTIMATORS[name], group_size=4)
    assert all(signs(mdp, update).values())
    assert cosine(update, mdp.gradient()) > 0.5


@EACH
@pytest.mark.parametrize("name", EXACT)
def test_the_sum_of_turn_rewards_gives_estimators_of_episodes_the_gradient(mdp: MDP, name: str) -> None:
    options, share = EXACT[name]
    update, gradient = expected_update(mdp, ESTIMATORS[name], group_size=4, **options), mdp.gradient()
    if share is None:
        assert cosine(update, gradient) > 0.995
    else:
        torch.testing.assert_close(update, share * gradient, atol=1e-12, rtol=1e-9)


def test_turn_grpo_points_the_wrong_way_where_a_turn_decides_what_later_ones_earn() -> None:
    """Or gives it no credit, as docs/agents.md says; so does the mean of turn rewards."""
    right = {name: expected_update(mdp, ESTIMATORS["turn_grpo"], group_size=4, **RAW) for name, mdp in MDPS.items()}
    wrong = [name for name, update in right.items() if not all(signs(MDPS[name], update).values())]
    assert wrong == [
        *("stop or go", "better to stop", "only the end pays", "a price first", "a bait", "each turn costs", "chance"),
    ]
    apart = "turns that do not touch"
    torch.testing.assert_close(right[apart], 3 / 4 * MDPS[apart].gradient(), atol=1e-12, rtol=1e-9)
    by_mean = expected_update(STOP_OR_GO, mean_of_turns, group_size=4)
    assert not all(signs(STOP_OR_GO, by_mean).values())


@pytest.mark.parametrize("options", [{}, RAW])
def test_turn_grpo_of_discounted_returns_is_turn_returns(options: dict[str, Any]) -> None:
    """So it is right after apply_reward_discount, where turn_returns would count later rewards twice."""
    gamma = 0.5
    as_set = make_turn_step([("a", line(1, 0, 2)), ("a", line(0, 1)), ("a", line(3))])
    returns = make_turn_step([("a", line(1.5, 1, 2)), ("a", line(0.5, 1)), ("a", line(3))])
    expected = ESTIMATORS["turn_returns"](as_set, gamma=gamma, **options).advantages
    torch.testing.assert_close(ESTIMATORS["turn_grpo"](returns, **options).advantages, expected)
