"""Policy losses against verl, slime and RL2, values and gradients, and rules of our own."""

from __future__ import annotations
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
import pytest
import torch
from torch import Tensor
from areal_lite.errors import ConfigError
from areal_lite.trainer.objectives.aggregation import LossTerms, aggregate, episode_mean, token_weights
from areal_lite.trainer.objectives.corrections import (
    drifted_episodes,
    icepop_weights,
    importance_weights,
    rejection_mask,
)
from areal_lite.trainer.objectives.kl import kl_penalty
from areal_lite.trainer.objectives.policy_loss import (
    POLICY_LOSSES,
    PolicyInputs,
    aggregation_of,
    cispo,
    clip_cov,
    gmpo,
    gspo,
    kl_cov,
    m2po,
    ppo,
)
from tests.trainer.oracle_cases import DTYPES, assert_matches, case, inputs

TOKEN_MEAN, EPISODE_MEAN = "token-mean", "seq-mean-token-mean"
DUAL = {"dual_clip": 3.0}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


def flat(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs(name, dtype)[mask]


def loss_called(name: str) -> Callable[..., LossTerms]:
    return POLICY_LOSSES[name]


def oracle_inputs(mask: Tensor, dtype: torch.dtype, *, advantages: str = "advantages") -> PolicyInputs:
    return PolicyInputs(
        policy=flat("log_prob", mask, dtype).requires_grad_(),
        proximal=flat("old_log_prob", mask, dtype),
        behaviour=flat("rollout_log_prob", mask, dtype),
        advantages=flat(advantages, mask, dtype),
        episodes=mask.nonzero()[:, 0],
    )


def check(key: str, loss: Tensor, policy: Tensor, mask: Tensor, dtype: torch.dtype) -> None:
    (gradient,) = torch.autograd.grad(loss, policy)
    padded = torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, gradient)
    per_episode = any(part in key for part in ("gspo", "sapo", "geo_mean", "seq-mean-token-mean"))
    for ours, field in ((loss, "loss"), (padded, "grad")):
        expected = case(key, field, dtype)
        if per_episode and dtype == torch.float64:  # the oracle adds 1e-8 to the token count it divides an episode by
            torch.testing.assert_close(ours, expected, rtol=2e-8, atol=2e-8)
        else:
            assert_matches(ours, expected)


CASES: list[tuple[str, str, dict[str, Any], str, str]] = [
    *(
        (f"loss.{theirs}.{mode}", ours, options, "advantages", mode)
        for theirs, ours, options in (
            ("vanilla.sym", "ppo", DUAL),
            ("cispo", "cispo", {}),
            ("gpg", "gpg", {}),
        )
        for mode in (TOKEN_MEAN, "seq-mean-token-sum", EPISODE_MEAN)
    ),
    (
        "loss.vanilla.cliphigher_c1.5",
        "ppo",
        {"clip_eps_high": 0.28, "dual_clip": 1.5},
        "advantages",
        TOKEN_MEAN,
    ),
    ("loss.gspo.eps3e-2", "gspo", {"clip_eps": 3e-2, "clip_eps_high": 4e-2}, "adv_seq", EPISODE_MEAN),
    ("loss.geo_mean", "gmpo", {}, "adv_seq", EPISODE_MEAN),
    ("loss.sapo", "sapo", {}, "advantages", EPISODE_MEAN),
    ("loss.kl_cov", "kl_cov", {"token_share": 0.1, "kl_coef": 0.7}, "advantages", TOKEN_MEAN),
]


@dtypes
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mask_name", ["mask", "mask_mt"])
@pytest.mark.parametrize(("key", "name", "options", "advantages", "mode"), CASES, ids=[c[0] for c in CASES])
def test_losses_and_gradients_equal_the_oracles(
    key: str,
    name: str,
    options: Any,
    advantages: str,
    mode: Any,
    mask_name: str,
    weighted: bool,
    dtype: torch.dtype,
) -> None:
    """L1 to L5, L7, L8, each with and without correction weights that multiply the losses."""
    mask = inputs(mask_name, dtype).bool()
    data = oracle_inputs(mask, dtype, advantages=advantages)
    weights = token_weights(mode, data.episodes)
    if weighted:
        correction = flat("is_weights", mask, dtype)
        weights = weights * (episode_mean(correction.log(), data.episodes).exp() if name == "gmpo" else correction)
    terms = loss_called(name)(data, **options)
    key = f"{key}.{mask_name}.is{int(weighted)}"

    check(key, aggregate(terms.losses, weights), data.policy, mask, dtype)

    for ours, theirs in (("clip_fraction", "pg_clipfrac"), ("clip_fraction_lower", "pg_clipfrac_lower")):
        if ours in terms.statistics and name != "gmpo":  # whose clips are counted there where they decide nothing
            expected = case(key, "metrics", dtype)[f"actor/{theirs}"]
            assert terms.statistics[ours].mean().item() == pytest.approx(expected)


@dtypes
def test_ratios_are_clamped_at_exp_20(dtype: torch.dtype) -> None:
    """L1: log-probs 30 times as large overflow nothing, and beyond the bound no gradient flows."""
    mask = inputs("mask", dtype).bool()
    data = oracle_inputs(mask, dtype)
    extreme = replace(data, policy=data.policy * 30)
    loss = aggregate(ppo(extreme, dual_clip=3.0).losses, token_weights(TOKEN_MEAN, data.episodes))
    check("loss.vanilla.extreme_ratio", loss, data.policy, mask, dtype)
    far = small([50.0], advantages=[-1.0])
    losses = ppo(far).losses
    assert losses.item() == pytest.approx(math.exp(20))
    assert torch.autograd.grad(losses.sum(), far.policy)[0].item() == 0


@pytest.mark.parametrize(
    ("level", "option", "bounds"),
    [
        (None, None, ""),
        ("token", None, ""),
        ("sequence", None, ""),
        ("token", "token_k1", f"{1 / 1.6}_{1 / 0.6}"),  # the oracle's bounds act on the inverse ratio
        ("token", "seq_mean_k3,token_k2", "0.05,0.4"),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "reinforce"])
def test_bypass_mode_uses_the_behaviour_policy_as_the_proximal_one(
    name: str, level: str | None, option: str | None, bounds: str
) -> None:
    """L9: PPO needs no further weight, REINFORCE takes policy / behaviour; rejected tokens count nowhere."""
    mask = inputs("mask").bool()
    sampled = flat("old_log_prob", mask, torch.float64)
    data = replace(oracle_inputs(mask, torch.float64), proximal=sampled, behaviour=sampled)
    keep = torch.ones_like(data.episodes, dtype=torch.bool)
    if option is not None:
        keep = rejection_mask(data.policy, sampled, data.episodes, option=option, bounds=bounds)
    weights = torch.zeros(len(keep), dtype=torch.float64)
    weights[keep] = token_weights(TOKEN_MEAN, data.episodes[keep])
    if name == "reinforce" and level is not None:
        weights = weights * importance_weights(data.policy, sampled, data.episodes, level=level, max_weight=2.0)
    options = {"clip_eps_high": 0.28, **DUAL} if name == "ppo" else {}

    loss = aggregate(loss_called(name)(data, **options).losses, weights)

    theirs = "ppo_clip" if name == "ppo" else "reinforce"
    check(f"loss.bypass.{theirs}.is_{level}.rs_{option}", loss, data.policy, mask, torch.float64)


@pytest.mark.parametrize("dual_clip", [None, 1.5, 3.0])
def test_ppo_equals_slimes(dual_clip: float | None) -> None:
    mask = inputs("mask").bool()
    terms = ppo(oracle_inputs(mask, torch.float64), clip_eps_high=0.28, dual_clip=dual_clip)
    assert_matches(terms.losses, case(f"slime.policy.c{dual_clip}", "loss_mat")[mask])
    assert_matches(terms.statistics["clip_fraction"], case(f"slime.policy.c{dual_clip}", "clipfrac")[mask].double())


def test_cispo_equals_slimes() -> None:
    mask = inputs("mask").bool()
    terms = cispo(oracle_inputs(mask, torch.float64))
    assert_matches(terms.losses, case("slime.cispo", "loss_mat")[mask])
    assert_matches(terms.statistics["clip_fraction"], case("slime.cispo", "clipfrac")[mask].double())


def test_gspo_equals_slimes() -> None:
    """L2, over episodes with tool tokens between."""
    mask = inputs("mask_mt").bool()
    data = replace(oracle_inputs(mask, torch.float64), advantages=torch.ones(int(mask.sum()), dtype=torch.float64))
    terms = gspo(data, clip_eps=1.0, clip_eps_high=100.0)
    assert_matches(terms.losses, -torch.exp(-case("slime.gspo_kl", "value")[mask]))


def test_off_policy_episodes_with_a_bad_score_are_masked_as_in_slime() -> None:
    mask = inputs("mask").bool()
    data = oracle_inputs(mask, torch.float64, advantages="adv_seq")
    drifted = drifted_episodes(data.policy, data.proximal, data.advantages, data.episodes, max_kl=0.02)
    assert (~drifted).tolist() == case("slime.opsm", "mask")[mask].bool().tolist()
    assert 0 < drifted.sum() < len(drifted)


@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_corrected_losses_equal_slimes(name: str) -> None:
    mask = inputs("mask").bool()
    data = oracle_inputs(mask, torch.float64)
    weights = (
        importance_weights(data.proximal, data.behaviour, data.episodes, level="token", max_weight=2.0)
        if name == "tis"
        else icepop_weights(data.proximal, data.behaviour, lower=0.5, upper=2.0)
    )
    assert_matches(weights, case(f"slime.{name}", "pg_loss")[mask] / inputs("advantages")[mask])


@pytest.mark.parametrize("max_weight", [0.0, 2.0])
def test_ppo_with_penalty_and_entropy_equals_rl2s(max_weight: float) -> None:
    mask = inputs("mask").bool()
    data = oracle_inputs(mask, torch.float64)
    entropy = flat("sum_pi_squared", mask, torch.float64)  # what the oracle was given as such
    terms = ppo(data)
    losses = terms.losses + 0.1 * kl_penalty(data.policy, flat("ref_log_prob", mask, torch.float64), "k2")
    if max_weight:
        level = "token"
        losses = losses * importance_weights(
            data.policy, data.behaviour, data.episodes, level=level, max_weight=max_weight
        )
    losses = losses - 0.01 * entropy

    assert_matches(losses, case(f"rl2.actor.tis{max_weight}", "loss_mat")[mask])
    (gradient,) = torch.autograd.grad(losses.sum(), data.policy)
    assert_matches(gradient, case(f"rl2.actor.tis{max_weight}", "grad")[mask])
    clipped = case(f"rl2.actor.tis{max_weight}", "clip")[mask]
    assert torch.equal(terms.statistics["clip_fraction"].bool(), clipped.bool())


def small(policy: list[float], *, episodes: list[int] | None = None, **others: list[float]) -> PolicyInputs:
    values = {"proximal": [0.0] * len(policy), "advantages": [1.0] * len(policy), **others}
    values.setdefault("behaviour", values["proximal"])
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    episode_numbers = torch.zeros(len(policy), dtype=torch.int64) if episodes is None else torch.tensor(episodes)
    return PolicyInputs(
        policy=torch.tensor(policy, dtype=torch.float64, requires_grad=True),
        episodes=episode_numbers,
        **tensors,
    )


def test_clip_cov_drops_only_unclipped_tokens_of_high_covariance() -> None:
    """L6: which of the candidates is drawn is free, what they are is not; the global RNG stays as it was."""
    mask = inputs("mask").bool()
    data = oracle_inputs(mask, torch.float64)
    bounds = {"token_share": 0.05, "min_covariance": 0.1, "max_covariance": 5.0}
    before = torch.get_rng_state()

    terms = clip_cov(data, **bounds)

    assert torch.equal(torch.get_rng_state(), before)
    again = clip_cov(data, **bounds)
    assert torch.equal(terms.losses, again.losses)
    plain = ppo(data)
    dropped = terms.statistics["clip_fraction"].bool()
    policy, advantages = data.policy.detach(), data.advantages
    covariance = (advantages - advantages.mean()) * (policy - policy.mean())
    candidates = (covariance > 0.1) & (covariance < 5.0) & ~plain.statistics["clip_fraction"].bool()
    assert int(dropped.sum()) == int(0.05 * len(policy)) < int(candidates.sum())
    assert bool((candidates | ~dropped).all())
    assert torch.equal(terms.losses, torch.where(dropped, 0.0, plain.losses))
    lots = [clip_cov(replace(data, behaviour=data.behaviour + n), **bounds).losses for n in range(9)]
    assert len({tuple(losses.tolist()) for losses in lots}) > 1


@dtypes
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mask_name", ["mask", "mask_mt"])
def test_clip_cov_with_the_oracles_draw_has_the_oracles_loss(
    mask_name: str, weighted: bool, dtype: torch.dtype
) -> None:
    """L6: the oracle draws as many tokens, of the same candidates."""
    mask = inputs(mask_name, dtype).bool()
    data = oracle_inputs(mask, dtype)
    bounds = {"token_share": 0.05, "min_covariance": 0.1, "max_covariance": 5.0}
    key = f"loss.clip_cov.{mask_name}.is{int(weighted)}"
    (gradient,) = torch.autograd.grad(ppo(data).losses.sum(), data.policy)
    theirs = (case(key, "grad", dtype)[mask] == 0) & (gradient != 0)
    ours = clip_cov(data, **bounds)
    all_candidates = clip_cov(data, **(bounds | {"token_share": 1.0})).chosen
    assert ours.chosen is not None
    assert all_candidates is not None
    assert ours.chosen.sum() == theirs.sum() < all_candidates.sum()
    assert bool((all_candidates | ~theirs).all())
    assert case(key, "metrics", dtype)["actor/pg_clipfrac"] == pytest.approx(
        ours.statistics["clip_fraction"].mean().item()
    )
    weights = token_weights(TOKEN_MEAN, data.episodes)
    if weighted:
        weights = weights * flat("is_weights", mask, dtype)
    loss = aggregate(clip_cov(replace(data, chosen=theirs), **bounds).losses, weights)
    check(key, loss, data.policy, mask, dtype)


def test_clip_cov_keeps_tokens_outside_its_bounds() -> None:
    """L6: covariances are 1.5, 0, 0 and 1.5."""
    data = small([0.0, 1.0, 1.0, 2.0], proximal=[0.0, 1.0, 1.0, 2.0], advantages=[-1.5, 0.0, 0.0, 1.5])
    for bounds, dropped in (((1.0, 2.0), 1), ((1.0, 1.5), 0), ((1.5, 2.0), 0)):
        terms = clip_cov(data, min_covariance=bounds[0], max_covariance=bounds[1])
        assert terms.statistics["clip_fraction"].sum() == dropped


def test_statistics_by_hand() -> None:
    """Log-ratios 0.5 and -0.5 under advantages above 0: only the first can be clipped."""
    data = small([0.5, -0.5])
    statistics = gmpo(data).statistics
    assert statistics["ratio"].tolist() == pytest.approx([math.exp(0.5), math.exp(-0.5)])
    assert statistics["approx_kl"].tolist() == pytest.approx([0.148721, 0.106531], abs=1e-6)
    assert statistics["clip_fraction"].tolist() == [1, 0]
    assert ppo(data).statistics["clip_fraction"].tolist() == [1, 0]
    assert not any(values.requires_grad for values in {**statistics, **ppo(data).statistics}.values())


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "cispo"])
def test_clipped_tokens_are_counted_by_the_bound_they_left(name: str) -> None:
    data = small(
        [math.log(1.5), math.log(0.5), 0.0], proximal=[0.0] * 3, advantages=[0.5, -0.5, 0.5], episodes=[0, 1, 2]
    )
    statistics = loss_called(name)(data, clip_eps=0.25, clip_eps_high=0.25).statistics
    assert statistics["clip_fraction"].tolist() == [1, 1, 0]
    assert statistics["clip_fraction_low"].tolist() == [0, 1, 0]
    assert statistics["clip_fraction_high"].tolist() == [1, 0, 0]


def test_only_a_ratio_above_the_dual_clip_is_capped() -> None:
    data = small([1.0, 1.0, 1.0], proximal=[0.0] * 3, advantages=[-1.0, 0.0, 1.0])
    ratio = data.policy.detach().exp()[0].item()
    for dual_clip, capped in ((ratio, 0), (1.5, 1)):
        assert ppo(data, dual_clip=dual_clip).statistics["clip_fraction_lower"].tolist() == [capped, 0, 0]


def test_kl_cov_penalises_one_token_of_a_small_batch() -> None:
    terms = kl_cov(small([0.0, 1.0, 3.0], advantages=[0.0, 1.0, 3.0]))
    assert terms.chosen is not None and terms.chosen.tolist() == [False, False, True]


def test_defaults_are_those_of_the_papers() -> None:
    defaults = {
        name: {
            option.name: option.default
            for option in inspect.signature(loss_called(name)).parameters.values()
            if option.kind is option.KEYWORD_ONLY
        }
        for name in POLICY_LOSSES
    }
    assert defaults == {
        "ppo": {"clip_eps": 0.2, "clip_eps_high": None, "dual_clip": None},
        "gspo": {"clip_eps": 3e-4, "clip_eps_high": 4e-4},
        "gmpo": {"clip_eps": 0.4, "clip_eps_high": None},
        "cispo": {"clip_eps": 1.0, "clip_eps_high": 0.28},
        "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
        "reinforce": {},
        "gpg": {},
        "clip_cov": {
            "clip_eps": 0.2,
            "clip_eps_high": None,
            "token_share": 2e-4,
            "min_covariance": 1.0,
            "max_covariance": 5.0,
        },
        "kl_cov": {"token_share": 2e-4, "kl_coef": 1.0},
        "m2po": {"max_second_moment": 0.04},
    }


def test_an_episodes_ratio_is_clamped_at_exp_10() -> None:
    """L2: the loss of a bad episode that the policy now favours is bounded, without gradient."""
    data = small([15.0, 15.0], advantages=[-1.0, -1.0])
    losses = gspo(data).losses
    assert losses.tolist() == pytest.approx([math.exp(10)] * 2)
    assert torch.autograd.grad(losses.sum(), data.policy)[0].tolist() == [0, 0]


def test_m2po_keeps_as_many_tokens_as_the_bound_allows() -> None:
    """Squares 0.25, 0.01, 0.04, 0.01, 0.01: their mean is 0.064, without the first 0.0175."""
    data = small(
        [0.5, 0.1, -0.2, 0.1, 0.1],
        proximal=[0.5, 0.0, 0.0, 0.0, 0.0],
        behaviour=[0.0] * 5,
        advantages=[2.0, 1.0, -1.0, 1.0, 3.0],
        episodes=[7, 7, 7, 2, 2],
    )
    terms = m2po(data, max_second_moment=0.04)
    ratios = torch.tensor([0.0, 0.1, -0.2, 0.1, 0.1], dtype=torch.float64).exp()
    assert_matches(
        terms.losses, -ratios * torch.tensor([0.0, 1.0, -1.0, 1.0, 3.0], dtype=torch.float64)
    )  # ratio to the proximal policy, choice by the behaviour policy
    assert terms.statistics["clip_fraction"].tolist() == [1, 0, 0, 0, 0]
    (gradient,) = torch.autograd.grad(terms.losses.sum(), data.policy)
    assert gradient[0] == 0


def test_m2po_keeps_a_token_at_the_bound() -> None:
    assert m2po(small([0.5]), max_second_moment=0.25).statistics["clip_fraction"].tolist() == [0]


def test_a_band_may_have_no_width() -> None:
    data = small([0.5, -0.5], advantages=[1.0, -1.0])
    assert ppo(data, clip_eps=0.0, clip_eps_high=0.0).losses.tolist() == [-1.0, 1.0]


def test_m2po_drops_nan_tokens_and_keeps_the_rest() -> None:
    data = small([0.1, 0.1, 0.1], behaviour=[float("nan"), float("-inf"), 0.0], episodes=[0, 0, 1])
    assert m2po(data).statistics["clip_fraction"].tolist() == [1, 1, 0]


def test_gmpo_excludes_episodes_without_tokens() -> None:
    """L8: upstream counts them in the mean."""
    data = small([0.0, 0.0], episodes=[0, 5])
    assert aggregate(gmpo(data).losses, token_weights(EPISODE_MEAN, data.episodes)).item() == -1.0


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_fresh_data_gives_the_policy_gradient(name: str) -> None:
    """Fresh data: every loss has the gradient -A, or -A spread over an episode where it has one ratio."""
    data = small([-1.0, -2.0, -0.5], proximal=[-1.0, -2.0, -0.5], advantages=[2.0, 2.0, -3.0], episodes=[0, 0, 1])
    options: dict[str, Any] = {"kl_coef": 0.0} if name == "kl_cov" else {}
    options |= {"min_covariance": 100.0, "max_covariance": 101.0} if name == "clip_cov" else {}
    terms = loss_called(name)(data, **options)
    (gradient,) = torch.autograd.grad(aggregate(terms.losses, token_weights(EPISODE_MEAN, data.episodes)), data.policy)
    assert_matches(gradient, torch.tensor([-0.5, -0.5, 1.5], dtype=torch.float64))
    assert terms.statistics["approx_kl"].tolist() == [0, 0, 0]


@dtypes
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_extreme_inputs_do_not_overflow(name: str, dtype: torch.dtype) -> None:
    """Advantages of a million, log-ratios of 80 nats either way; one token, one episode, episodes of one token."""
    for size, far, stale, shape in itertools.product(
        (1e6, -1e6, 0.0), (80.0, -80.0), (80.0, -80.0), ("0", "00", "552")
    ):
        proximal = torch.full((len(shape),), -100.0, dtype=dtype)
        data = PolicyInputs(
            policy=(proximal + far).requires_grad_(),
            proximal=proximal,
            behaviour=proximal + stale,
            advantages=torch.full_like(proximal, size),
            episodes=torch.tensor([int(episode) for episode in shape]),
        )
        terms = loss_called(name)(data)
        (gradient,) = torch.autograd.grad(terms.losses.sum(), data.policy)
        assert all(bool(found.isfinite().all()) for found in (terms.losses, gradient, *terms.statistics.values()))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_empty_step_gives_a_zero_that_backpropagates(name: str) -> None:
    data = small([])
    loss = aggregate(loss_called(name)(data).losses, token_weights(TOKEN_MEAN, data.episodes))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, data.policy)[0].shape == (0,)


CHOOSING: dict[str, dict[str, Any]] = {
    "clip_cov": {"token_share": 0.1, "min_covariance": 0.1},
    "kl_cov": {"token_share": 0.1},
    "m2po": {},
}
"""Losses that select tokens of a minibatch, with options that make them select here."""


def of_tokens(whole: PolicyInputs, here: Tensor, **changes: Tensor | None) -> PolicyInputs:
    """Return the inputs of the tokens ``here``, bool or places."""
    names = ("policy", "proximal", "behaviour", "advantages", "episodes")
    return PolicyInputs(**{name: getattr(whole, name)[here] for name in names}, **changes)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_episodes_losses_do_not_depend_on_other_episodes(name: str) -> None:
    """After tokens are selected in the whole minibatch."""
    whole = oracle_inputs(inputs("mask").bool(), torch.float64)
    loss, options = loss_called(name), CHOOSING.get(name, {})
    terms = loss(whole, **options)
    assert (terms.chosen is None) == (name not in CHOOSING)
    for episode in set(whole.episodes.tolist()):
        here = whole.episodes == episode
        part = of_tokens(whole, here, chosen=None if terms.chosen is None else terms.chosen[here])
        found = loss(part, **options)
        torch.testing.assert_close(found.losses, terms.losses[here])
        for key, values in terms.statistics.items():
            torch.testing.assert_close(found.statistics[key], values[here])


@pytest.mark.parametrize("name", CHOOSING)
def test_token_selection_does_not_depend_on_order_or_rounding(name: str) -> None:
    whole = oracle_inputs(inputs("mask").bool(), torch.float64)
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    order = shuffled[whole.episodes].argsort(stable=True)
    moved = of_tokens(replace(whole, policy=whole.policy * (1 + 1e-9)), order)
    chosen, again = (loss_called(name)(data, **CHOOSING[name]).chosen for data in (whole, moved))
    assert chosen is not None
    assert again is not None
    assert 0 < chosen.sum() < len(chosen)
    assert torch.equal(chosen[order], again)


def test_losses_of_episodes_average_over_episodes() -> None:
    """L2, L8 and SAPO, unless options say otherwise."""
    averages = {name: aggregation_of(name, where="w") for name in POLICY_LOSSES}
    assert {name for name, mode in averages.items() if mode == EPISODE_MEAN} == {"gspo", "gmpo", "sapo"}
    assert set(averages.values()) == {EPISODE_MEAN, TOKEN_MEAN}
    assert aggregation_of("sapo", TOKEN_MEAN, where="w") is TOKEN_MEAN
    assert aggregation_of("gspo", EPISODE_MEAN, where="w") is EPISODE_MEAN
    with pytest.raises(ConfigError, match=r"actor\.aggregation is token-mean: gspo has one ratio per episode"):
        aggregation_of("gspo", TOKEN_MEAN, where="actor.aggregation")
