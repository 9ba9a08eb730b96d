"""Settings that cannot work are refused before a model is loaded, with their key."""

from __future__ import annotations

from typing import Any

import pytest

from areal_lite.api.trainer_config import CorrectionConfig, CriticConfig, KLConfig, TrainerConfig
from areal_lite.errors import ConfigError
from areal_lite.trainer.algorithm import Algorithm
from areal_lite.trainer.estimators.estimator import ESTIMATORS
from areal_lite.trainer.objectives.policy_loss import POLICY_LOSSES

CRITIC = CriticConfig(learning_rate=1e-3)


def algorithm(max_new_tokens: int | None = None, **settings: Any) -> Algorithm:
    config = TrainerConfig(total_steps=1, learning_rate=1e-3, **settings)
    return Algorithm(config, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("loss", POLICY_LOSSES.names())
@pytest.mark.parametrize("advantage", ESTIMATORS.names())
def test_every_estimator_goes_with_every_loss(advantage: str, loss: str) -> None:
    made = algorithm(advantage=advantage, loss=loss, critic=CRITIC if advantage == "gae" else None)
    assert made.needs_proximal_early == (advantage == "optimal_token_baseline")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"advantage": "gpro"}, "did you mean 'grpo'"),
        ({"advantage": "gae"}, "trainer.critic"),
        ({"critic": CRITIC}, "trainer.critic has nothing to learn from 'grpo'"),
        ({"advantage_kwargs": {"gama": 1}}, "trainer.advantage_kwargs: .* has no argument 'gama'"),
        ({"advantage": "reinforce", "advantage_kwargs": {"gamma": 2.0}}, "use 0 to 1"),
        ({"advantage": "gpg", "advantage_kwargs": {"f_norm": 0.0}}, "trainer.advantage"),
        ({"loss_kwargs": {"clip_eps": -0.2}}, "trainer.loss_kwargs: clip_eps is -0.2"),
        ({"loss_kwargs": {"clip_eps": "wide"}}, "trainer.loss 'ppo' does not work"),
        ({"loss_kwargs": {"dual_clip": 0.5}}, "dual_clip is 0.5"),
        ({"loss_aggregation": "seq-mean-token-sum-norm"}, "divides by loss_scale"),
        ({"loss": "gspo", "loss_aggregation": "token-mean"}, "trainer.loss_aggregation"),
        ({"kl": KLConfig(coef=0.1, target=0.5)}, "trainer.kl.target"),
        ({"overlong_buffer": 4}, "trainer.overlong_buffer"),
        (
            {"correction": CorrectionConfig(reject="token_k9", reject_bounds="1")},
            "trainer.correction.reject: ",
        ),
        ({"correction": CorrectionConfig(reject_bounds="1")}, "trainer.correction.reject_bounds"),
        ({"correction": CorrectionConfig(outside="mask", level="sequence")}, "set level: token"),
        (
            {"correction": CorrectionConfig(outside="mask", min_weight=2, max_weight=1)},
            "nothing would be trained",
        ),
        (
            {"correction": CorrectionConfig(reject="token_k2", reject_bounds="1"), "proximal": "behaviour"},
            "remove one",
        ),
    ],
)
def test_what_cannot_work_is_told_with_its_key(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        algorithm(**settings)


def test_only_losses_that_are_known_to_vanish_let_samples_be_left_out() -> None:
    own = "tests.trainer.training_data.squared_ratio"
    assert not algorithm().needs_every_sample
    assert algorithm(loss=own).needs_every_sample
    assert algorithm(loss="kl_cov").needs_every_sample
    assert algorithm(entropy_coef=0.1).needs_every_sample
    assert algorithm(kl=KLConfig(coef=0.1)).needs_every_sample
    assert not algorithm(kl=KLConfig(coef=0.1, place="reward")).needs_every_sample
