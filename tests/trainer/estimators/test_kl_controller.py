from __future__ import annotations

import json

import pytest
import torch

from areal_lite.errors import ConfigError
from areal_lite.trainer.estimators.reward_penalties import KLController, kl_in_reward, mean_kl
from tests.trainer.oracle_cases import assert_matches, case, inputs


def test_an_adaptive_coefficient_follows_upstreams_trace() -> None:
    """A12."""
    controller = KLController(0.2, target=6.0, horizon=10000)
    trace = []
    for kl, episodes in ((3, 256), (9, 256), (6, 512), (100, 64), (0, 64)):
        controller.update(kl, episodes)
        trace.append(controller.coef)
    assert trace == pytest.approx(case("ctrl.adaptive_kl", "trace"), abs=1e-12)


def test_a_fixed_coefficient_never_changes() -> None:
    """A12."""
    controller = KLController(0.05)
    controller.update(100.0, 64)
    controller.load_state(controller.state() | {"coef": 1.0})
    assert controller.coef == 0.05


def test_a_step_uses_the_coefficient_from_before_its_update() -> None:
    """V51: the mean is over episodes of the mean over their tokens."""
    chosen = inputs("mask").bool()
    episodes = chosen.nonzero()[:, 0]
    kl = (inputs("old_log_prob") - inputs("ref_log_prob"))[chosen]
    controller = KLController(0.05, target=0.1, horizon=1000)

    rewards = kl_in_reward(inputs("rewards_outcome")[chosen], kl, controller.coef)
    controller.update(mean_kl(kl, episodes), len(chosen))

    assert_matches(rewards, case("kl.in_reward", "token_level_rewards")[chosen])
    metrics = case("kl.in_reward", "metrics")
    assert mean_kl(kl, episodes) == pytest.approx(metrics["actor/reward_kl_penalty"], abs=1e-8)
    assert controller.coef == pytest.approx(case("kl.in_reward", "next_coef"), abs=1e-12)


def test_an_episode_without_tokens_has_no_kl() -> None:
    assert mean_kl(torch.tensor([1.0, 3.0, 4.0]), torch.tensor([0, 0, 2])) == 3.0
    assert mean_kl(torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == 0.0


def test_a_resumed_controller_restores_its_coefficient() -> None:
    first, resumed = (KLController(0.2, target=6.0, horizon=1000) for _ in range(2))
    first.update(9.0, 256)
    resumed.load_state(json.loads(json.dumps(first.state())))
    for controller in (first, resumed):
        controller.update(1.0, 64)
    assert first.coef == resumed.coef != 0.2


def test_a_non_finite_kl_leaves_the_coefficient_unchanged() -> None:
    controller = KLController(0.2, target=6.0, horizon=1000)
    with pytest.raises(ValueError, match="the step's KL is nan"):
        controller.update(float("nan"), 8)
    assert controller.coef == 0.2


@pytest.mark.parametrize("setting", [{"target": 0.0, "horizon": 1.0}, {"target": 1.0, "horizon": -1.0}])
def test_target_and_horizon_must_be_above_0(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"trainer.kl.\w+ is .*: it must be above 0"):
        KLController(0.2, **setting)
