"""Losses of pairs, against RL2 and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from areal_lite.trainer.objectives.policy_loss import dpo_loss, reward_model_loss
from tests.trainer.oracle_cases import assert_matches, case, inputs


def test_dpo_equals_rl2s() -> None:
    """Scores 2i and 2i+1 are of the chosen and the rejected answer."""
    mask = inputs("mask")
    policy, reference = (((inputs(name) * mask).sum(1)) for name in ("log_prob", "ref_log_prob"))
    terms = dpo_loss(policy[::2], policy[1::2], reference[::2], reference[1::2], beta=0.1)
    assert_matches(terms.losses, case("rl2.dpo", "losses"))
    metrics = case("rl2.dpo", "metrics")
    for ours, theirs in (
        ("accuracy", "accuracy"), ("margin", "rewards/margin"),
        ("chosen_reward", "rewards/chosen"), ("rejected_reward", "rewards/rejected"),
    ):  # fmt: skip
        assert terms.statistics[ours].tolist() == pytest.approx(metrics[f"{theirs}/train"])


def test_label_smoothing_is_the_expected_loss_of_randomly_swapped_pairs() -> None:
    chosen, rejected, zero = torch.tensor([2.0]), torch.tensor([-1.0]), torch.zeros(1)
    right = dpo_loss(chosen, rejected, zero, zero, beta=0.5).losses
    wrong = dpo_loss(rejected, chosen, zero, zero, beta=0.5).losses
    smoothed = dpo_loss(chosen, rejected, zero, zero, beta=0.5, label_smoothing=0.2).losses
    torch.testing.assert_close(smoothed, 0.8 * right + 0.2 * wrong)


def test_by_default_no_label_is_smoothed_and_beta_is_a_tenth() -> None:
    zero = torch.zeros(1)
    loss = dpo_loss(torch.tensor([20.0]), torch.tensor([-10.0]), zero, zero).losses.item()
    assert loss == pytest.approx(math.log1p(math.exp(-3)))


def test_reward_model_loss_by_hand() -> None:
    terms = reward_model_loss(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0]))
    assert terms.losses.tolist() == pytest.approx([math.log(2), math.log1p(math.exp(2))])
    assert terms.statistics["accuracy"].tolist() == [0, 0]
    assert terms.statistics["margin"].tolist() == [0, -2]


def test_a_margin_increases_the_loss() -> None:
    chosen = torch.tensor([3.0, 1.0], requires_grad=True)
    terms = reward_model_loss(chosen, torch.zeros(2), margin=torch.tensor([3.0, 1.0]))
    assert terms.losses.tolist() == pytest.approx([math.log(2)] * 2)
    (gradient,) = torch.autograd.grad(terms.losses.sum(), chosen)
    assert gradient.tolist() == [-0.5, -0.5]


def test_no_pairs_give_a_zero_that_backpropagates() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    loss = dpo_loss(nothing, nothing, nothing, nothing).losses.sum()
    assert torch.autograd.grad(loss, nothing)[0].shape == (0,)
