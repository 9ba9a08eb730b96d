from __future__ import annotations
import pytest
import torch
from areal_lite.config.trainer_config import KLConfig, TrainerConfig
from areal_lite.trainer.objectives.kl import adapted_coef, mean_kl
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.step_tokens import StepTokens
from tests.trainer.oracle_cases import assert_matches, case, inputs


def test_an_adaptive_coefficient_follows_upstreams_trace() -> None:
    """A12."""
    coef, trace = 0.2, []
    for kl, episodes in ((3, 256), (9, 256), (6, 512), (100, 64), (0, 64)):
        coef = adapted_coef(coef, kl, episodes, target=6.0, horizon=10000)
        trace.append(coef)
    assert trace == pytest.approx(case("ctrl.adaptive_kl", "trace"), abs=1e-12)


@pytest.mark.parametrize("target", [None, 0.1])
def test_a_step_uses_the_coefficient_from_before_its_update(target: float | None) -> None:
    """V51: the mean is over episodes of the mean over their tokens. A12: without a target the coefficient stays."""
    chosen = inputs("mask").bool()
    tokens = StepTokens.zeros(chosen.nonzero()[:, 0])
    tokens.rewards = inputs("rewards_outcome")[chosen]
    tokens.proximal, tokens.reference = inputs("old_log_prob")[chosen], inputs("ref_log_prob")[chosen]
    horizon = {} if target is None else {"horizon": 1000.0}
    kl = KLConfig(coef=0.05, place="reward", estimator="k1", target=target, **horizon)
    algorithm = Algorithm(TrainerConfig(total_steps=1, learning_rate=1e-3, kl=kl), max_new_tokens=None)

    metrics = algorithm.penalize(tokens, len(chosen))

    assert_matches(tokens.rewards, case("kl.in_reward", "token_level_rewards")[chosen])
    expected = case("kl.in_reward", "metrics")["actor/reward_kl_penalty"]
    assert metrics == {"reward_kl": pytest.approx(expected, abs=1e-8), "reward_kl_coef": 0.05}
    following = 0.05 if target is None else case("kl.in_reward", "next_coef")
    assert algorithm.kl_coef == pytest.approx(following, abs=1e-12)


def test_an_episode_without_tokens_has_no_kl() -> None:
    assert mean_kl(torch.tensor([1.0, 3.0, 4.0]), torch.tensor([0, 0, 2])) == 3.0
    assert mean_kl(torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == 0.0
