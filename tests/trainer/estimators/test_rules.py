"""Properties of estimators, by hand or for random steps."""

from __future__ import annotations
from dataclasses import replace
from typing import Any
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from areal_lite.errors import ConfigError
from areal_lite.trainer.estimators import ESTIMATORS, EstimatorInputs
from areal_lite.trainer.estimators.advantage_estimators import discounted_sums
from areal_lite.trainer.rl.algorithm import chosen_function
from tests.trainer.turn_data import with_whole_turns

GROUP_NAMES = ["grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]


def make_step(
    scores: list[float], groups: str, lengths: list[int] | None = None, dtype: torch.dtype = torch.float64
) -> EstimatorInputs:
    """Return a step whose episodes have ``lengths`` tokens (1 each) and earn their score on the last."""
    counts = torch.tensor(lengths or [1] * len(scores))
    episodes = torch.arange(len(scores)).repeat_interleave(counts)
    rewards = torch.zeros(len(episodes), dtype=dtype)
    has_token = counts > 0
    rewards[(counts.cumsum(0) - 1)[has_token]] = torch.tensor(scores, dtype=dtype)[has_token]
    return EstimatorInputs(
        scores=torch.tensor(scores, dtype=dtype),
        group_ids=list(groups),
        episodes=episodes,
        token_rewards=rewards,
    )


def run(name: str, step: EstimatorInputs, **options: Any) -> Tensor:
    result: Tensor = ESTIMATORS[name](step, **options).advantages
    return result


def with_probabilities(step: EstimatorInputs) -> EstimatorInputs:
    torch.manual_seed(0)
    logprobs = -torch.rand_like(step.token_rewards)
    return replace(step, proximal_logprobs=logprobs, sum_squared_probs=logprobs.exp() / 2)


def recursion(values: Tensor, episodes: Tensor, discount: float) -> Tensor:
    result = values.clone()
    for place in reversed(range(len(values) - 1)):
        if episodes[place] == episodes[place + 1]:
            result[place] += discount * result[place + 1]
    return result


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=8)
rewards = st.integers(-50, 50).map(lambda value: value / 7)
episodes_of_groups = st.lists(st.tuples(rewards, st.sampled_from("abc"), st.integers(1, 4)), min_size=1, max_size=12)


@given(lengths, st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.integers(0, 2**31))
@settings(deadline=None, max_examples=60)
def test_discounted_sums_are_the_recursion_along_each_episode(counts: list[int], discount: float, seed: int) -> None:
    episodes = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    values = torch.randn(len(episodes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        discounted_sums(values, episodes, discount),
        recursion(values, episodes, discount),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("discount", [0.95, 1.0])
def test_float32_sums_of_long_episodes_are_as_precise_as_float64(discount: float) -> None:
    torch.manual_seed(0)
    episodes, values = torch.zeros(8192, dtype=torch.int64), torch.randn(8192)
    torch.testing.assert_close(
        discounted_sums(values, episodes, discount).double(),
        recursion(values.double(), episodes, discount),
        rtol=1e-5,
        atol=1e-4,
    )


def test_a_non_finite_number_stays_in_its_episode() -> None:
    sums = discounted_sums(torch.tensor([1.0, 1.0, torch.nan, 1.0]), torch.tensor([0, 0, 1, 1]), 1.0)
    torch.testing.assert_close(sums, torch.tensor([2.0, 1.0, torch.nan, 1.0]), equal_nan=True)


def test_gae_uses_the_critic_at_lambda_0_and_the_rewards_at_lambda_1() -> None:
    """A1: returns are taken before whitening."""
    step = replace(make_step([1.0, 5.0], "ab", [3, 1]), values=torch.tensor([0.5, 0.25, 0.5, 4.0], dtype=torch.float64))
    trusting = ESTIMATORS["gae"](step, gamma=1.0, lam=0.0)
    torch.testing.assert_close(trusting.returns, torch.tensor([0.25, 0.5, 1.0, 5.0], dtype=torch.float64))
    rewarded = ESTIMATORS["gae"](step, gamma=0.5, lam=1.0)
    torch.testing.assert_close(rewarded.returns, torch.tensor([0.25, 0.5, 1.0, 5.0], dtype=torch.float64))
    for estimate in (trusting, rewarded):
        assert abs(estimate.advantages.mean()) < 1e-12
        assert abs(estimate.advantages.var() - 1) < 1e-6


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_one_token_cannot_be_whitened_and_gets_0(name: str) -> None:
    """A1."""
    step = replace(make_step([3.0], "a"), values=torch.tensor([1.0], dtype=torch.float64))
    assert run(name, step).tolist() == [0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_without_trained_tokens_has_no_advantages(name: str) -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    step = with_whole_turns(with_probabilities(make_step([1.0, 0.0], "aa", [0, 0])))
    assert run(name, replace(step, values=empty, baselines=torch.zeros(2))).shape == (0,)


@pytest.mark.parametrize("name", [*GROUP_NAMES, "optimal_token_baseline"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_one_and_a_group_of_equal_rewards_get_exactly_0(name: str, dtype: torch.dtype) -> None:
    """A2, A4, A6, A8, A9, A10, A11: singletons. The mean of equal floats need not equal them."""
    step = with_probabilities(make_step([7.0, 0.1, 0.1, 0.1, 2.0, 1.0], "asssvv", [3, 2, 1, 4, 2, 1], dtype))
    ours = run(name, step)
    assert ours.dtype == dtype
    assert (ours[step.episodes < 4] == 0).all()
    assert (ours[step.episodes == 4] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_close_rewards_keep_their_difference(dtype: torch.dtype) -> None:
    """A3: a sum of squares in float32 would give -150 to 149."""
    ours = run("grpo", make_step([10000.0, 10000.1, 10000.2, 10000.3], "aaaa", dtype=dtype))
    torch.testing.assert_close(ours, torch.tensor([-1.1619, -0.3873, 0.3873, 1.1619], dtype=dtype), atol=5e-3, rtol=0)


BY_HAND: list[tuple[str, list[float]]] = [
    # a: rewards 1, 0, 0, 1 of 1, 2, 3, 2 tokens; b: 4, 2 of 1 token each
    ("grpo", [0.8660, -0.8660, -0.8660, 0.8660, 0.7071, -0.7071]),  # deviations 0.5774 and 1.4142
    ("dr_grpo", [0.5, -0.5, -0.5, 0.5, 1.0, -1.0]),
    ("grpo_passk", [0.0, 0.0, 0.0, 0.0, 1.4142, 0.0]),  # two are best in a; 2 / 1.4142 in b
    ("rloo", [0.6667, -0.6667, -0.6667, 0.6667, 2.0, -2.0]),
    ("opo", [0.625, -0.375, -0.375, 0.625, 1.0, -1.0]),  # the mean of a is 3 / 8
    ("gpg", [0.75, -0.75, -0.75, 0.75, 1.5, -1.5]),  # 6 episodes, 4 of them with a reward
]


@pytest.mark.parametrize(("name", "expected"), BY_HAND)
def test_group_estimators_by_hand(name: str, expected: list[float]) -> None:
    """A2, A4, A8, A9, A10."""
    step = make_step([1, 0, 0, 1, 4, 2], "aaaabb", [1, 2, 3, 2, 1, 1])
    torch.testing.assert_close(
        run(name, step), torch.tensor(expected, dtype=torch.float64)[step.episodes], atol=1e-4, rtol=0
    )


@given(episodes_of_groups, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_the_order_of_episodes_does_not_matter(drawn: list[tuple[float, str, int]], random: Any) -> None:
    order = list(range(len(drawn)))
    random.shuffle(order)
    step, shuffled = (
        make_step(
            [score for score, _, _ in episodes],
            "".join(group for _, group, _ in episodes),
            [n for _, _, n in episodes],
        )
        for episodes in (drawn, [drawn[place] for place in order])
    )
    for name in [*GROUP_NAMES, "reinforce_plus_plus"]:
        before, after = run(name, step), run(name, shuffled)
        expected = torch.cat([before[step.episodes == episode] for episode in order])
        torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)


@given(episodes_of_groups, st.integers(-1000, 1000))
@settings(deadline=None, max_examples=40)
def test_advantages_of_a_group_sum_to_0_and_ignore_a_bonus_for_all(
    drawn: list[tuple[float, str, int]], bonus: int
) -> None:
    scores, groups = [score for score, _, _ in drawn], "".join(group for _, group, _ in drawn)
    for name in ("grpo", "dr_grpo", "rloo"):
        ours = run(name, make_step(scores, groups))
        for group in set(groups):
            assert abs(ours[[member == group for member in groups]].sum()) < 1e-9
        raised = run(name, make_step([score + bonus for score in scores], groups))
        torch.testing.assert_close(raised, ours, rtol=1e-6, atol=1e-8)


def test_a_lone_reward_is_scaled_up_by_the_number_of_episodes() -> None:
    """A10."""
    step = make_step([1.0, 0.0, 0.0, 0.0], "aaaa")
    assert run("gpg", step).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert run("gpg", step, f_norm=2.0).tolist() == [1.5, -0.5, -0.5, -0.5]
    assert run("gpg", make_step([0.0, 0.0], "aa")).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "turn_grpo", "turn_returns"])
def test_rewards_that_differ_by_a_rounding_error_get_small_advantages(name: str) -> None:
    ours = run(name, with_whole_turns(make_step([1e-8, 0.0], "aa")))
    assert 0 <= ours.max() < 0.02


def test_equal_negative_rewards_are_not_whitened() -> None:
    """A6."""
    ours = run("reinforce_plus_plus_baseline", make_step([-2.0, -2.0, 1.0, 0.0, 3.0], "aabbb"))
    assert ours[:2].tolist() == [0.0, 0.0] and (ours[2:] != 0).all()


@pytest.mark.parametrize("credited", [True, False])
def test_the_tail_of_the_longest_episode_gets_its_return_on_request(credited: bool) -> None:
    """A11: not in a group of one."""
    step = with_probabilities(make_step([2.0, 0.0, 5.0], "aab", [3, 1, 2]))
    ours = run("optimal_token_baseline", step, credit_lone_tail=credited)
    assert ours[1:3].tolist() == ([2.0, 2.0] if credited else [0.0, 0.0])
    assert ours[0] != 0 and ours[4:].tolist() == [0.0, 0.0]


def test_a_kl_penalty_lowers_the_reward_of_its_episode() -> None:
    step = make_step([1.0, 1.0], "aa", [2, 1])
    penalised = replace(step, token_rewards=step.token_rewards - torch.tensor([0.25, 0.25, 0.0]))
    assert run("dr_grpo", penalised).tolist() == [-0.25, -0.25, 0.25]
    assert run("reinforce", penalised, gamma=1.0).tolist() == [0.5, 0.75, 1.0]


def test_remax_subtracts_the_greedy_reward() -> None:
    """A7."""
    step = replace(make_step([1.0, 0.0], "aa", [2, 1]), baselines=torch.tensor([0.25, 0.5], dtype=torch.float64))
    assert run("remax", step).tolist() == [0.75, 0.75, -0.5]


def test_an_optimal_baseline_weighs_episodes_by_the_gradient_up_to_a_position() -> None:
    """A11: norms 0.5 and 1, then 1 alone; an importance weight counts squared."""
    half = torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64)
    step = replace(
        make_step([3.0, 0.0], "aa", [1, 2]),
        proximal_logprobs=torch.full_like(half, 0.5).log(),
        sum_squared_probs=half,
    )
    torch.testing.assert_close(
        run("optimal_token_baseline", step),
        torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64),
        rtol=1e-6,
        atol=1e-6,
    )
    weighted = replace(step, importance_weights=torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(  # 2 against 1
        run("optimal_token_baseline", weighted),
        torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64),
        rtol=1e-6,
        atol=1e-6,
    )


def test_tokens_of_probability_1_do_not_divide_by_a_rounding_error() -> None:
    """A11: float32 may put ``1 - 2 p + sum p^2`` just below 0."""
    sure = torch.zeros(2)
    step = replace(
        make_step([1.0, 0.0], "aa", dtype=torch.float32),
        proximal_logprobs=sure,
        sum_squared_probs=torch.tensor([1 - 6e-8, 1 + 1.2e-7]),
    )
    assert run("optimal_token_baseline", step).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gae", "the value of each token: configure trainer.critic"),
        ("remax", "the reward of a greedy answer to each prompt: have one generated"),
        ("optimal_token_baseline", "proximal log-probs: have the trainer compute them"),
    ],
)
def test_an_estimator_without_its_input_says_what_to_configure(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        run(name, make_step([1.0, 0.0], "aa"))


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("gae", {"gamma": 1.0, "lam": 1.0}),
        ("reinforce", {"gamma": 1.0}),
        ("reinforce_plus_plus", {"gamma": 1.0}),
        ("optimal_token_baseline", {"credit_lone_tail": False}),
        ("grpo", {"divide_by_std": True}),
        ("grpo_passk", {"divide_by_std": True}),
        ("gpg", {"f_norm": 1.0}),
        ("turn_grpo", {"divide_by_std": True}),
        ("turn_returns", {"gamma": 1.0, "divide_by_std": True}),
    ],
)
def test_options_have_the_documented_defaults(name: str, defaults: dict[str, Any]) -> None:
    step = with_whole_turns(with_probabilities(make_step([1.0, 0.0, 0.5], "aab", [3, 1, 2])))
    step = replace(step, values=torch.arange(6) / 7)
    assert torch.equal(run(name, step), run(name, step, **defaults))


def test_unknown_estimator_options_are_refused() -> None:
    assert run("grpo", make_step([1.0, 0.0], "aa"), divide_by_std=False).tolist() == [0.5, -0.5]
    with pytest.raises(ConfigError, match="'dr_grpo' has no argument 'gamma'"):
        chosen_function(ESTIMATORS, "dr_grpo", {"gamma": 1.0}, where="trainer.advantage")
