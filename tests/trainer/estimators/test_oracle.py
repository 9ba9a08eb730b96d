"""Estimators against verl's outputs; where verl is wrong (spec 3.6), the right value."""

from __future__ import annotations
from dataclasses import replace
import pytest
import torch
from torch import Tensor
from areal_lite.trainer.estimators import ESTIMATORS, Estimate, EstimatorInputs
from areal_lite.trainer.estimators.inputs import whiten
from tests.trainer.oracle_cases import DTYPES, assert_matches, case, inputs, keys
from tests.trainer.turn_data import with_whole_turns

SINGLETON_EPISODE = 0  # group 3 has no other


def step(mask: str, rewards: str, dtype: torch.dtype, *, groups: str = "group") -> EstimatorInputs:
    """Return the oracle's padded arrays as one flat step."""
    chosen = inputs(mask, dtype).bool()

    def flat(name: str) -> Tensor:
        return inputs(name, dtype)[chosen]

    return EstimatorInputs(
        scores=inputs(rewards, dtype).sum(1),
        group_ids=[str(group) for group in inputs(groups, dtype).tolist()],
        episodes=chosen.nonzero()[:, 0],
        token_rewards=flat(rewards),
        values=flat("values"),
        baselines=inputs("reward_baselines", dtype),
        proximal_logprobs=flat("old_log_prob"),
        sum_squared_probs=flat("sum_pi_squared"),
    )


def upstream(key: str, field: str, dtype: torch.dtype) -> Tensor:
    """Return ``[T]`` verl's output at the trained tokens of the mask that ``key`` ends with."""
    flat: Tensor = case(key, field, dtype)[inputs(key.split(".")[-1]).bool()]
    return flat


def advantages(name: str, given: EstimatorInputs, **options: float | bool) -> Tensor:
    estimate: Estimate = ESTIMATORS[name](given, **options)
    assert estimate.advantages.dtype == given.token_rewards.dtype
    return estimate.advantages


def split(key: str) -> tuple[str, str]:
    """Return the rewards and the mask that a key ends with."""
    rewards, mask = key.split(".")[-2:]
    return rewards, mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", keys("adv.gae."))
def test_gae_skips_tool_tokens_and_whitens_over_trained_tokens_only(key: str, dtype: torch.dtype) -> None:
    """A1."""
    rewards, mask = split(key)
    gamma, lam = (float(part[1:]) for part in key.removeprefix("adv.gae.").split(".rewards")[0].split("_"))
    given = step(mask, rewards, dtype)
    estimate = ESTIMATORS["gae"](given, gamma=gamma, lam=lam)
    assert_matches(estimate.advantages, upstream(key, "advantages", dtype))
    assert_matches(estimate.returns, upstream(key, "returns", dtype))


GROUP_CASES: dict[str, tuple[str, dict[str, bool]]] = {
    "adv.grpo.std1": ("grpo", {}),
    "adv.grpo.std0": ("dr_grpo", {}),
    "adv.rloo": ("rloo", {}),
    "adv.rloo_vectorized": ("rloo", {}),
    "adv.opo": ("opo", {}),
    "adv.gpg": ("gpg", {}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["mask", "mask_mt"])
@pytest.mark.parametrize("rewards", ["rewards_outcome", "rewards_binary"])
@pytest.mark.parametrize("case_name", GROUP_CASES)
def test_group_estimators_equal_verls_except_that_a_group_of_one_gets_0(
    case_name: str, rewards: str, mask: str, dtype: torch.dtype
) -> None:
    """A2, A8, A9, A10; Dr. GRPO."""
    name, options = GROUP_CASES[case_name]
    given = step(mask, rewards, dtype)
    expected = upstream(f"{case_name}.{rewards}.{mask}", "advantages", dtype)
    expected[given.episodes == SINGLETON_EPISODE] = 0
    assert_matches(advantages(name, given, **options), expected)


@pytest.mark.parametrize("key", keys("adv.grpo_vectorized."))
def test_grpo_equals_both_of_verls_variants(key: str) -> None:
    """A3: upstream's vectorized form works in float32 and adds its 1e-6 elsewhere."""
    rewards, mask = split(key)
    given = step(mask, rewards, torch.float64)
    expected = upstream(key, "advantages", torch.float64)
    expected[given.episodes == SINGLETON_EPISODE] = 0
    ours = advantages("grpo", given, divide_by_std=".std1." in key)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", keys("adv.grpo_passk."))
def test_pass_at_k_gives_an_advantage_to_the_best_episode_only(key: str, dtype: torch.dtype) -> None:
    """A4."""
    rewards, mask = split(key)
    given = step(mask, rewards, dtype, groups="group_pairs")
    ours = advantages("grpo_passk", given, divide_by_std=".std1." in key)
    assert_matches(ours, upstream(key, "advantages", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", keys("adv.remax."))
def test_remax_subtracts_the_greedy_reward_from_the_return(key: str, dtype: torch.dtype) -> None:
    """A7."""
    rewards, mask = split(key)
    given = step(mask, rewards, dtype)
    estimate = ESTIMATORS["remax"](given)
    assert_matches(estimate.advantages, upstream(key, "advantages", dtype))
    assert_matches(estimate.returns, upstream(key, "returns", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", [key for key in keys("adv.rpp.") if key.endswith(".mask")])
def test_reinforce_plus_plus_equals_verl_on_single_turns(key: str, dtype: torch.dtype) -> None:
    """A5."""
    rewards, mask = split(key)
    gamma = float(key.removeprefix("adv.rpp.g").split(".rewards")[0])
    given = step(mask, rewards, dtype)
    whitened = advantages("reinforce_plus_plus", given, gamma=gamma)
    assert_matches(whitened, upstream(key, "advantages", dtype))
    assert_matches(advantages("reinforce", given, gamma=gamma), upstream(key, "returns", dtype))


@pytest.mark.parametrize("gamma", [1.0, 0.95])
@pytest.mark.parametrize("rewards", ["rewards_outcome", "rewards_binary"])
def test_reinforce_plus_plus_carries_credit_over_tool_tokens_undiscounted(rewards: str, gamma: float) -> None:
    """A5: upstream gives the tokens before a tool's answer a return of 0."""
    mask = inputs("mask_mt")
    right = torch.zeros_like(mask)
    running = torch.zeros(len(mask), dtype=mask.dtype)
    for place in range(mask.shape[1] - 1, -1, -1):
        trained = mask[:, place] == 1
        running = torch.where(trained, inputs(rewards)[:, place] + gamma * running, running)
        right[:, place] = running
    right = right[mask.bool()]
    right = (right - right.mean()) / (right.var() + 1e-8).sqrt()
    ours = advantages("reinforce_plus_plus", step("mask_mt", rewards, torch.float64), gamma=gamma)
    assert_matches(ours, right)
    cut = upstream(f"adv.rpp.g{gamma}.{rewards}.mask_mt", "advantages", torch.float64)
    assert (ours - cut).abs().max() > 0.1


@pytest.mark.parametrize("mask", ["mask", "mask_mt"])
@pytest.mark.parametrize("rewards", ["rewards_outcome", "rewards_binary"])
def test_reinforce_plus_plus_baseline_whitens_centred_rewards(rewards: str, mask: str) -> None:
    """A6: as upstream, once its group of one is centred like the others."""
    given = step(mask, rewards, torch.float64)
    centred = advantages("dr_grpo", given)
    alone = given.episodes == SINGLETON_EPISODE

    raw = whiten(torch.where(alone, given.scores[SINGLETON_EPISODE], centred))
    assert_matches(raw, upstream(f"adv.rpp_baseline.{rewards}.{mask}", "advantages", torch.float64))

    right = torch.where(alone, 0.0, whiten(centred))
    assert_matches(advantages("reinforce_plus_plus_baseline", given), right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", keys("adv.tir_otb."))
def test_the_optimal_token_baseline_counts_trained_tokens_only(key: str, dtype: torch.dtype) -> None:
    """A11: equal rewards at a place, the lone tail and the group of one are exactly 0, or the return where asked."""
    (weighted, tail), mask = (part[-1] for part in key.split(".")[2].split("_")), key.split(".")[-1]
    given = step(mask, "rewards_outcome", dtype)
    if weighted == "1":
        given = replace(given, importance_weights=inputs("is_weights", dtype)[inputs(mask).bool()])
    ours = advantages("optimal_token_baseline", given, credit_lone_tail=tail == "1")

    expected = upstream(key, "advantages", dtype)
    expected[given.episodes == SINGLETON_EPISODE] = 0
    residue = expected.abs() < 1e-6  # of a lone tail's return, for upstream adds 1e-8 to the weights
    assert_matches(ours, torch.where(residue, 0.0, expected))
    assert residue.sum() == (given.episodes == SINGLETON_EPISODE).sum() + (0 if tail == "1" else 3)


def test_both_optimal_token_baselines_agree_on_single_turns() -> None:
    """Upstream's two names agree on them, so the flat layout leaves one."""
    for key in keys("adv.otb."):
        if key.endswith(".mask"):
            other = key.replace("adv.otb", "adv.tir_otb")
            assert torch.equal(case(key, "advantages"), case(other, "advantages"))


@pytest.mark.parametrize("key", keys("rl2.gae.") + keys("slime.gae."))
def test_gae_equals_rl2_and_slime(key: str) -> None:
    """A1: slime takes all 17 places for tokens and whitens later; RL2 adds 1e-8 to a deviation."""
    trained = inputs("mask").bool()
    chosen = torch.ones_like(trained) if key.startswith("slime") else trained
    gamma, lam = map(float, key.split(".g")[-1].split("_l"))
    given = EstimatorInputs(
        scores=inputs("scores"),
        group_ids=[""] * len(chosen),
        episodes=chosen.nonzero()[:, 0],
        token_rewards=(inputs("rewards_dense") * trained)[chosen],
        values=inputs("values")[chosen],
    )
    estimate = ESTIMATORS["gae"](given, gamma=gamma, lam=lam)
    assert estimate.returns is not None
    ours = estimate.returns - given.values if key.startswith("slime") else estimate.advantages
    here = trained[chosen]
    assert_matches(estimate.returns[here], case(key, "returns")[trained])
    torch.testing.assert_close(ours[here], case(key, "advantages")[trained], rtol=1e-9, atol=2e-8)


@pytest.mark.parametrize("std", [0, 1])
@pytest.mark.parametrize(("level", "size"), [("global0", 4), ("global1", 12)])
def test_centred_rewards_equal_rl2_and_slime(level: str, size: int, std: int) -> None:
    """A2, over groups of four or the whole batch as one; they add other floors to a deviation, slime in float32."""
    groups = [str(episode // size) for episode in range(12)]
    given = replace(step("mask", "rewards_outcome", torch.float64), group_ids=groups)
    ours = advantages("grpo" if std else "dr_grpo", given)
    expected = case(f"rl2.reinforce.{level}.var{std}", "advantages")[inputs("mask").bool()]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    if size == 4:
        slime = torch.tensor(case(f"slime.group_norm.grpo.std{std}", "rewards")).double()[given.episodes]
        torch.testing.assert_close(ours, slime, rtol=1e-6, atol=1e-6)


def test_discounted_returns_minus_a_penalty_equal_slimes() -> None:
    """A5, V51."""
    given, mask = step("mask", "rewards_outcome", torch.float64), inputs("mask").bool()
    penalty = 0.05 * (inputs("old_log_prob") - inputs("ref_log_prob"))[mask]
    ours = advantages("reinforce", replace(given, token_rewards=given.token_rewards - penalty), gamma=0.95)
    assert_matches(ours, case("slime.rpp_returns", "returns")[mask])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_episode_without_trained_tokens_only_changes_the_baseline(name: str) -> None:
    """mask_dead: episode 2 of group 1 has no token, but its answer was judged."""
    given = with_whole_turns(step("mask_dead", "rewards_outcome", torch.float64))
    assert 2 not in given.episodes
    ours = advantages(name, given)
    assert ours.shape == given.episodes.shape
    assert ours.isfinite().all()
    if name == "dr_grpo":
        members = torch.tensor([group == "1" for group in given.group_ids])
        mean = given.scores[members].mean()
        assert_matches(ours[given.episodes == 4], (given.scores[4] - mean).expand(3))
