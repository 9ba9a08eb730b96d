"""Losses of pairs, against RL2 and by hand."""

from __future__ import annotations
import math
import pytest
import torch
from areal_lite.trainer.supervised.preference_trainer import RewardModelTrainer, dpo_loss
from tests.trainer.oracle_cases import assert_matches, case, inputs


def test_dpo_equals_rl2s() -> None:
    """Scores 2i and 2i+1 are of the chosen and the rejected answer."""
    mask = inputs("mask")
    policy, reference = (((inputs(name) * mask).sum(1)) for name in ("log_prob", "ref_log_prob"))
    ahead = policy - reference
    terms = dpo_loss(ahead[::2], ahead[1::2], beta=0.1, label_smoothing=0.0)
    assert_matches(terms.losses, case("rl2.dpo", "losses"))
    metrics = case("rl2.dpo", "metrics")
    for ours, theirs in (
        ("accuracy", "accuracy"), ("margin", "rewards/margin"),
        ("chosen_reward", "rewards/chosen"), ("rejected_reward", "rewards/rejected"),
    ):  # fmt: skip
        assert terms.statistics[ours].tolist() == pytest.approx(metrics[f"{theirs}/train"])


def test_label_smoothing_is_the_expected_loss_of_randomly_swapped_pairs() -> None:
    chosen, rejected = torch.tensor([2.0]), torch.tensor([-1.0])
    right = dpo_loss(chosen, rejected, beta=0.5, label_smoothing=0.0).losses
    wrong = dpo_loss(rejected, chosen, beta=0.5, label_smoothing=0.0).losses
    smoothed = dpo_loss(chosen, rejected, beta=0.5, label_smoothing=0.2).losses
    torch.testing.assert_close(smoothed, 0.8 * right + 0.2 * wrong)


def test_reward_model_loss_by_hand() -> None:
    trainer = RewardModelTrainer.__new__(RewardModelTrainer)
    terms = trainer._pair_losses(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0]))
    assert terms.losses.tolist() == pytest.approx([math.log(2), math.log1p(math.exp(2))])
    assert terms.statistics["accuracy"].tolist() == [0, 0]
    assert terms.statistics["margin"].tolist() == [0, -2]


def test_no_pairs_give_a_zero_that_backpropagates() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    loss = dpo_loss(nothing, nothing, beta=0.1, label_smoothing=0.0).losses.sum()
    assert torch.autograd.grad(loss, nothing)[0].shape == (0,)
