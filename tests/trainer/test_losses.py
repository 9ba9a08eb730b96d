from __future__ import annotations

import math

import pytest
import torch

from areal_lite.trainer.losses import decoupled_ppo_loss, entropy_bonus, kl_k3, kl_penalty, ppo_statistics
from tests.trainer.oracle import oracle

ALL = torch.tensor([True])


def one_token(*, ratio: float = 1.0, weight: float = 1.0, advantage: float = 1.0, **settings: float) -> float:
    """Loss of one token whose policy / proximal and proximal / behaviour are given."""
    loss = decoupled_ppo_loss(
        torch.tensor([math.log(ratio)]),
        torch.tensor([0.0]),
        torch.tensor([-math.log(weight)]),
        torch.tensor([advantage]),
        ALL,
        num_loss_tokens=1,
        **settings,
    )
    return loss.item()


def test_fresh_data_gives_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    fresh = logprobs.detach()
    advantages = torch.tensor([2.0, 2.0, -3.0])
    mask = torch.tensor([True, False, True])
    decoupled_ppo_loss(logprobs, fresh, fresh, advantages, mask, num_loss_tokens=2).backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.0, 0.0, 1.5]))


def test_the_ratio_is_clipped_on_the_side_that_would_go_further() -> None:
    assert one_token(ratio=1.5, advantage=2.0) == pytest.approx(-2.4)  # 1.2 * 2
    assert one_token(ratio=0.5, advantage=2.0) == pytest.approx(-1.0)  # going back is not clipped
    assert one_token(ratio=0.5, advantage=-2.0) == pytest.approx(1.6)  # 0.8 * 2
    assert one_token(ratio=1.5, advantage=-2.0) == pytest.approx(3.0)


def test_the_upper_bound_may_be_wider() -> None:
    assert one_token(ratio=1.5, clip_eps_high=0.28) == pytest.approx(-1.28)
    assert one_token(ratio=0.5, advantage=-1.0, clip_eps_high=0.28) == pytest.approx(0.8)


def test_stale_tokens_are_weighted_by_proximal_over_behaviour_up_to_a_bound() -> None:
    assert one_token(weight=3.0) == pytest.approx(-3.0)
    assert one_token(weight=30.0) == pytest.approx(-5.0)
    assert one_token(weight=30.0, max_behaviour_weight=7.0) == pytest.approx(-7.0)


def test_only_the_policy_carries_gradient() -> None:
    policy, proximal, behaviour = (torch.tensor([-1.0], requires_grad=True) for _ in range(3))
    decoupled_ppo_loss(policy, proximal.detach(), behaviour, torch.ones(1), ALL, num_loss_tokens=1).backward()
    assert policy.grad is not None
    assert behaviour.grad is None


def test_cutting_a_step_into_micro_batches_leaves_the_loss_unchanged() -> None:
    torch.manual_seed(0)
    policy, proximal, behaviour, advantages = torch.randn(4, 10)
    mask = torch.arange(10) % 3 > 0
    whole = decoupled_ppo_loss(policy, proximal, behaviour, advantages, mask, num_loss_tokens=6)
    parts = [
        decoupled_ppo_loss(
            policy[cut], proximal[cut], behaviour[cut], advantages[cut], mask[cut], num_loss_tokens=6
        )
        for cut in (slice(0, 3), slice(3, 4), slice(4, 10))
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_a_value_that_is_not_finite_does_not_leak_from_an_untrained_token() -> None:
    policy = torch.tensor([math.nan, -1.0])
    zeros = torch.tensor([0.0, -1.0])
    loss = decoupled_ppo_loss(
        policy, zeros, zeros, torch.ones(2), torch.tensor([False, True]), num_loss_tokens=1
    )
    assert loss.item() == pytest.approx(-1.0)


@pytest.mark.parametrize("mask", ["mask", "mask_mt"])
@pytest.mark.parametrize("weighted", [0, 1])
def test_verl_computes_the_same_loss_and_gradient(mask: str, weighted: int) -> None:
    chosen = oracle(f"in/{mask}").bool()
    policy = oracle("in/log_prob").clone().requires_grad_()
    proximal = oracle("in/old_log_prob")
    behaviour = proximal - oracle("in/is_weights").log() if weighted else proximal
    loss = decoupled_ppo_loss(
        policy,
        proximal,
        behaviour,
        oracle("in/advantages"),
        chosen,
        num_loss_tokens=int(chosen.sum()),
        max_behaviour_weight=1e9,
    )
    loss.backward()
    name = f"out/loss.vanilla.sym.token-mean.{mask}.is{weighted}"
    torch.testing.assert_close(loss, oracle(f"{name}/loss"), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(policy.grad, oracle(f"{name}/grad"), atol=1e-9, rtol=1e-9)


def test_verl_computes_the_same_k3() -> None:
    torch.testing.assert_close(
        kl_k3(oracle("in/log_prob"), oracle("in/ref_log_prob")),
        oracle("out/kl.low_var_kl/value"),
        atol=1e-9,
        rtol=1e-9,
    )


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    values = kl_k3(torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -2.0, -1.0]))
    torch.testing.assert_close(values, torch.tensor([0.0, math.exp(-1), math.e - 2]))


def test_penalty_and_bonus_are_means_over_the_tokens_of_the_step() -> None:
    mask = torch.tensor([True, True, False])
    ones = torch.ones(3)
    assert kl_penalty(ones, ones + 1, mask, num_loss_tokens=4).item() == pytest.approx((math.e - 2) / 2)
    assert entropy_bonus(torch.tensor([1.0, 3.0, 9.0]), mask, num_loss_tokens=4).item() == pytest.approx(1.0)


def test_statistics_say_what_the_loss_did() -> None:
    policy = torch.tensor([math.log(1.5), math.log(1.5), 0.0, 99.0])
    proximal = torch.zeros(4)
    behaviour = torch.tensor([0.0, 1.0, -math.log(8.0), 7.0])
    statistics = ppo_statistics(
        policy,
        proximal,
        behaviour,
        torch.tensor([1.0, -1.0, 1.0, 1.0]),
        torch.tensor([True, True, True, False]),
    )
    assert statistics["clip_fraction"] == pytest.approx(1 / 3)  # the first; the second may go back
    assert statistics["ratio_mean"] == pytest.approx(4 / 3)
    assert statistics["ratio_max"] == pytest.approx(1.5)
    assert statistics["approx_kl"] == pytest.approx(2 / 3 * (0.5 - math.log(1.5)))
    assert statistics["mismatch_mean"] == pytest.approx((1 + math.log(8)) / 3)
    assert statistics["behaviour_weight_mean"] == pytest.approx((1 + math.exp(-1) + 5) / 3)
    assert statistics["behaviour_weight_capped"] == pytest.approx(1 / 3)


def test_statistics_of_no_token_are_finite() -> None:
    none = torch.zeros(2)
    statistics = ppo_statistics(none, none, none, none, torch.zeros(2, dtype=torch.bool))
    assert all(math.isfinite(value) for value in statistics.values())


def test_wrong_shapes_and_empty_steps_are_errors() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match="shapes differ"):
        decoupled_ppo_loss(one, one, two, one, ALL, num_loss_tokens=1)
    with pytest.raises(ValueError, match="num_loss_tokens is 0"):
        decoupled_ppo_loss(one, one, one, one, ALL, num_loss_tokens=0)
