"""Settings that cannot work are refused before a model is loaded, with their key."""

from __future__ import annotations
import inspect
import math
from typing import Any
import pytest
import torch
from torch import Tensor
from areal_lite.config.trainer_config import CorrectionConfig, CriticConfig, KLConfig, TrainerConfig
from areal_lite.errors import ConfigError
from areal_lite.trainer.estimators import ESTIMATORS, Estimate, EstimatorInputs
from areal_lite.trainer.objectives import LossTerms, PolicyInputs
from areal_lite.trainer.objectives.policy_loss import POLICY_LOSSES
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.step_tokens import StepTokens

CRITIC = CriticConfig(learning_rate=1e-3)


def algorithm(max_new_tokens: int | None = None, **settings: Any) -> Algorithm:
    config = TrainerConfig(total_steps=1, learning_rate=1e-3, **settings)
    return Algorithm(config, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_every_estimator_goes_with_every_loss(advantage: str, loss: str) -> None:
    made = algorithm(advantage=advantage, loss=loss, critic=CRITIC if advantage == "gae" else None)
    assert made.needs_proximal_early == (advantage == "optimal_token_baseline")
    assert made.chooses == (loss in ("clip_cov", "kl_cov", "m2po"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"advantage": "gpro"}, "did you mean 'grpo'"),
        ({"advantage": "gae"}, "trainer.critic"),
        ({"critic": CRITIC}, "trainer.critic has nothing to learn from 'grpo'"),
        ({"critic": CRITIC, "advantage": "reinforce"}, "trainer.critic is unused: 'reinforce'"),
        ({"advantage": "optimal_token_baseline", "proximal": "behaviour"}, "trainer.proximal: trainer"),
        ({"advantage_kwargs": {"gama": 1}}, "trainer.advantage_kwargs: .* has no argument 'gama'"),
        ({"loss_kwargs": {"clip_eps": "wide"}}, "trainer.loss_kwargs.clip_eps is 'wide': it must be a valid number"),
        ({"loss": "gspo", "loss_aggregation": "token-mean"}, "trainer.loss_aggregation"),
        ({"overlong_buffer": 4}, "trainer.overlong_buffer"),
        ({"overlong_buffer": 10, "max_new_tokens": 9}, "choose 1 to 9 tokens"),
        (
            {"advantage": "turn_grpo", "overlong_buffer": 4, "max_new_tokens": 9},
            "trainer.overlong_buffer .* 'turn_grpo'",
        ),
        (
            {"correction": CorrectionConfig(reject="token_k9", reject_bounds="1")},
            "trainer.correction.reject: ",
        ),
    ],
)
def test_invalid_settings_fail_with_their_key(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        algorithm(**settings)


BOUNDS = {
    "advantage": {
        **{name: {"gamma": (0, 1)} for name in ("reinforce", "reinforce_plus_plus", "turn_returns")},
        "gae": {"gamma": (0, 1), "lam": (0, 1)},
        "gpg": {"f_norm": (1e-9, None)},
    },
    "loss": {
        **{name: {"clip_eps": (0, None), "clip_eps_high": (0, None)} for name in ("gspo", "gmpo", "cispo")},
        "ppo": {"clip_eps": (0, None), "clip_eps_high": (0, None), "dual_clip": (1.001, None)},
        "sapo": {"tau_positive": (1e-9, None), "tau_negative": (1e-9, None)},
        "clip_cov": {"clip_eps": (0, None), "clip_eps_high": (0, None), "token_share": (0, 1)}
        | {"min_covariance": (None, None), "max_covariance": (None, None)},
        "kl_cov": {"token_share": (0, 1), "kl_coef": (0, None)},
        "m2po": {"max_second_moment": (0, None)},
    },
}


@pytest.mark.parametrize(
    ("key", "name", "option", "lowest", "highest"),
    [(key, name, option, *b) for key, table in BOUNDS.items() for name, o in table.items() for option, b in o.items()],
)
def test_every_number_has_its_bounds(
    key: str, name: str, option: str, lowest: float | None, highest: float | None
) -> None:
    critic = CRITIC if name == "gae" else None
    for value in (lowest, highest):
        if value is not None:
            algorithm(**{key: name, f"{key}_kwargs": {option: value}}, critic=critic)
    beyond = [value - 0.01 for value in (lowest,) if value is not None] + [1.01 for value in (highest,) if value]
    for value in (*beyond, math.nan, math.inf):
        with pytest.raises(ConfigError, match=rf"trainer\.{key}_kwargs\.{option} is {value}: it must be"):
            algorithm(**{key: name, f"{key}_kwargs": {option: value}}, critic=critic)


def test_every_number_is_listed() -> None:
    tables = {"advantage": ESTIMATORS, "loss": POLICY_LOSSES}
    for key, table in tables.items():
        options = {
            name: {p.name for p in inspect.signature(function).parameters.values() if type(p.default) in (int, float)}
            for name, function in table.items()
        }
        listed = {name: {option for option in found} for name, found in BOUNDS[key].items()}
        assert all(found <= listed.get(name, set()) for name, found in options.items())


def of_each_episode(inputs: EstimatorInputs) -> Estimate:
    return Estimate(inputs.scores)


def of_the_batch(inputs: EstimatorInputs) -> Estimate:
    return Estimate(inputs.scores.mean())


def whole_numbers(inputs: EstimatorInputs) -> Estimate:
    return Estimate(inputs.episodes)


def bare(inputs: EstimatorInputs) -> Any:
    return inputs.token_rewards


def broken(inputs: EstimatorInputs) -> Estimate:
    return Estimate(inputs.token_rewards + torch.zeros(3))


def less_value(inputs: EstimatorInputs, floor: float = 0.0) -> Estimate:
    return Estimate(inputs.token_rewards - inputs.needed("values"))


def with_returns_of_episodes(inputs: EstimatorInputs) -> Estimate:
    return Estimate(inputs.token_rewards, inputs.scores)


def weighed(inputs: EstimatorInputs) -> Estimate:
    return Estimate(inputs.token_rewards * inputs.needed("importance_weights"))


def of_answers(inputs: PolicyInputs) -> LossTerms:
    losses = -inputs.policy * inputs.advantages
    return LossTerms(losses.new_zeros(2).index_add(0, inputs.episodes, losses))


def averaged(inputs: PolicyInputs) -> LossTerms:
    return LossTerms((-inputs.policy * inputs.advantages).mean())


def detached(inputs: PolicyInputs) -> LossTerms:
    return LossTerms(-inputs.policy.detach() * inputs.advantages)


def averaged_statistic(inputs: PolicyInputs) -> LossTerms:
    return LossTerms(-inputs.policy * inputs.advantages, {"mine": inputs.advantages.mean()})


def chosen_by_ratio(inputs: PolicyInputs) -> LossTerms:
    return LossTerms(-inputs.policy * inputs.advantages, chosen=inputs.policy.detach())


def listed(inputs: EstimatorInputs) -> Estimate:
    return Estimate(inputs.token_rewards.tolist())  # type: ignore[arg-type]


def plain(inputs: PolicyInputs) -> Any:
    return -inputs.policy * inputs.advantages


@pytest.mark.parametrize(
    ("key", "name", "says"),
    [
        (
            "advantage",
            "of_each_episode",
            r"returns advantages of shape \[2\] and .*: give .* \[5\], .*inputs.per_token",
        ),
        ("advantage", "of_the_batch", r"returns advantages of shape \[\] "),
        ("advantage", "whole_numbers", r"of shape \[5\] and torch.int64: give floats"),
        ("advantage", "bare", r"returns a Tensor: return Estimate\(advantages, returns\)"),
        ("advantage", "with_returns_of_episodes", r"returns returns of shape \[2\]"),
        ("advantage", "listed", "returns advantages as list: give a tensor of floats"),
        ("advantage", "broken", "does not work with its options {}: RuntimeError"),
        (
            "loss",
            "of_answers",
            r"returns losses of shape \[2\] .* \[5\], one for each token; .*inputs.episodes",
        ),
        ("loss", "averaged", r"losses of shape \[\] .* \[5\], one for each token; the trainer averages them"),
        ("loss", "detached", "without a gradient: compute them from inputs.policy"),
        ("loss", "averaged_statistic", r"mine of shape \[\] .*: give numbers of shape \[5\]"),
        ("loss", "chosen_by_ratio", r"chosen of shape \[5\] and torch.float32: give bools"),
        ("loss", "plain", r"returns a Tensor: return LossTerms\(losses, statistics, chosen\)"),
    ],
)
def test_a_user_function_with_a_wrong_return_value_is_named(key: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.{key} '{__name__}\.{name}' .*{says}"):
        algorithm(**{key: f"{__name__}.{name}"})


def whitened(inputs: EstimatorInputs) -> Estimate:
    return Estimate(inputs.token_rewards / inputs.token_rewards.std() / inputs.scores.std())


def by_surprise(inputs: EstimatorInputs) -> Estimate:
    return Estimate(1 / inputs.needed("proximal_logprobs"))


def by_certainty(inputs: EstimatorInputs) -> Estimate:
    certainty = inputs.needed("sum_squared_probs")
    return Estimate((1 / certainty - 1).log())


def by_weight(inputs: EstimatorInputs) -> Estimate:
    return Estimate(1 / inputs.needed("importance_weights"))


@pytest.mark.parametrize("name", ["whitened", "by_surprise", "by_certainty", "by_weight"])
def test_a_user_function_that_is_finite_for_usual_inputs_is_accepted(name: str) -> None:
    algorithm(advantage=f"{__name__}.{name}")


@pytest.mark.parametrize(
    ("settings", "coupled"),
    [
        ({}, False),
        ({"correction": CorrectionConfig(reject="token_k2", reject_bounds="1")}, False),
        ({"correction": CorrectionConfig(reject="seq_mean_k2", reject_bounds="1")}, True),
        ({"correction": CorrectionConfig(level="sequence")}, True),
        ({"correction": CorrectionConfig(max_episode_kl=0.1)}, True),
        ({"loss": "gspo"}, True),
        ({"loss": "tests.trainer.training_data.squared_ratio"}, True),
    ],
)
def test_tokens_of_an_episode_stay_together_where_a_loss_depends_on_them(
    settings: dict[str, Any], coupled: bool
) -> None:
    assert algorithm(**settings).couples_tokens == coupled


@pytest.mark.parametrize(
    ("settings", "early"),
    [
        ({}, False),
        ({"proximal": "behaviour"}, True),
        ({"correction": CorrectionConfig(normalize=True)}, True),
        ({"kl": KLConfig(coef=0.1)}, False),
        ({"kl": KLConfig(coef=0.1, place="reward")}, True),
    ],
)
def test_proximal_log_probs_are_computed_early_only_where_needed(settings: dict[str, Any], early: bool) -> None:
    assert algorithm(**settings).needs_proximal_early == early


def answers(*lengths: int) -> tuple[StepTokens, Tensor]:
    """Return tokens of answers that earn 1 each."""
    tokens = StepTokens.zeros(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)))
    tokens.rewards[tokens.ends] = 1.0
    return tokens, torch.ones(len(lengths))


def test_an_overlong_answer_loses_reward_at_its_last_token() -> None:
    tokens, scores = answers(2, 4)
    made = algorithm(overlong_buffer=2, max_new_tokens=5)
    assert made.shape_rewards(scores, tokens) == {"overlong_penalty": -0.25, "overlong_fraction": 0.5}
    assert scores.tolist() == [1.0, 0.5]
    assert tokens.rewards.tolist() == [0, 1, 0, 0, 0, 0.5]
    assert algorithm().shape_rewards(scores, tokens) == {}


def test_the_kl_penalty_lowers_rewards_and_adapts_its_coefficient() -> None:
    tokens, _ = answers(1, 2)
    tokens.proximal = torch.tensor([-1.0, -1.0, -1.0])
    tokens.reference = torch.tensor([-3.0, -1.0, -2.0])
    kl = KLConfig(coef=0.5, place="reward", estimator="k1", target=0.1, horizon=10)
    made = algorithm(kl=kl)
    assert made.penalize(tokens, 2) == {"reward_kl": 1.25, "reward_kl_coef": 0.5}
    assert tokens.rewards.tolist() == [0.0, 0.0, 0.5]
    assert made.kl_coef == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        (CorrectionConfig(level="none"), [1.0, 1.0, 1.0]),
        (CorrectionConfig(max_weight=2.0), [2.0, 0.25, 1.0]),
        (CorrectionConfig(outside="mask", min_weight=0.5, max_weight=2.0), [0.0, 0.0, 1.0]),
        (CorrectionConfig(level="sequence", max_weight=9.0), [1.0, 1.0, 1.0]),
        (CorrectionConfig(level="none", reject="token_k1", reject_bounds="0.2_2"), [0.0, 1.0, 1.0]),
    ],
)
def test_off_policy_tokens_are_weighted_as_configured(settings: CorrectionConfig, weights: list[float]) -> None:
    """Ratios 4 and 1/4 in one episode, 1 in the other."""
    ratios = torch.tensor([4.0, 0.25, 1.0]).log()
    found = algorithm(correction=settings).correction(ratios, torch.zeros(3), torch.tensor([0, 0, 1]))
    assert found.tolist() == pytest.approx(weights)


def test_inputs_that_an_estimator_needs_are_computed_before_the_update() -> None:
    made = algorithm(advantage=f"{__name__}.weighed")
    assert made.needs == {"importance_weights"}
    assert made.needs_proximal_early
    assert algorithm(advantage="optimal_token_baseline").needs == {"proximal_logprobs", "sum_squared_probs"}
    assert algorithm(advantage="gae", critic=CRITIC).needs == {"values"}
    assert algorithm(advantage="turn_returns").needs == {"turns"}
    assert not algorithm().needs


def test_a_user_estimator_with_a_critic_must_return_returns() -> None:
    with pytest.raises(ConfigError, match=r"return Estimate\(advantages, returns\)"):
        algorithm(advantage=f"{__name__}.less_value", critic=CRITIC)


def test_a_positional_option_must_be_keyword_only() -> None:
    options = {"floor": 0.1}
    with pytest.raises(ConfigError, match=r"trainer.advantage_kwargs: .*'floor' .* must be keyword-only"):
        algorithm(advantage=f"{__name__}.less_value", critic=CRITIC, advantage_kwargs=options)


def test_only_losses_known_to_vanish_skip_episodes() -> None:
    own = "tests.trainer.training_data.squared_ratio"
    assert not algorithm().needs_every_episode
    assert algorithm(loss=own).needs_every_episode
    assert algorithm(loss="kl_cov").needs_every_episode
    assert not algorithm(loss="clip_cov").needs_every_episode
    assert algorithm(entropy_coef=0.1).needs_every_episode
    assert algorithm(kl=KLConfig(coef=0.1)).needs_every_episode
    assert not algorithm(kl=KLConfig(coef=0.1, place="reward")).needs_every_episode


def test_gmpo_gets_the_geometric_mean_of_the_weights() -> None:
    """L8: ratios 1 and 1/2 to the behaviour policy, of one episode."""
    proximal, behaviour, episodes = (
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-1.0, -2.0]),
        torch.zeros(2).long(),
    )
    behaviour[1] += math.log(2)
    for loss, weights in (("gmpo", [0.5**0.5, 0.5**0.5]), ("ppo", [1.0, 0.5])):
        found = algorithm(loss=loss).correction(proximal, behaviour, episodes)
        assert found.tolist() == pytest.approx(weights)
