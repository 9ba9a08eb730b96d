"""L13, L14: weights and rejections between behaviour and proximal policy, against verl, and the bounds' right side."""

from __future__ import annotations
import math
import pytest
import torch
from torch import Tensor
from areal_lite.errors import ConfigError
from areal_lite.trainer.objectives.corrections import (
    drifted_episodes,
    icepop_weights,
    importance_weights,
    rejection_mask,
)
from tests.trainer.oracle_cases import DTYPES, assert_matches, case, inputs, keys


def policies(mask: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return proximal, behaviour and episodes, ``[T]`` each."""
    return inputs("old_log_prob", dtype)[mask], inputs("rollout_log_prob", dtype)[mask], mask.nonzero()[:, 0]


def log(*ratios: float) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("mask_name", ["mask", "mask_mt"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("max_weight", [1.2, 2.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_equal_verls(
    level: str, max_weight: float, normalize: bool, mask_name: str, dtype: torch.dtype
) -> None:
    """L13."""
    mask = inputs(mask_name, dtype).bool()
    weights = importance_weights(*policies(mask, dtype), level=level, max_weight=max_weight, normalize=normalize)
    key = f"corr.is.{level}.th{max_weight}.bn{int(normalize)}.{mask_name}"
    expected = case(key, "weights", dtype)[mask]
    if normalize and dtype == torch.float64:  # the oracle adds 1e-8 to what it divides by
        torch.testing.assert_close(weights, expected, rtol=2e-8, atol=0)
    else:
        assert_matches(weights, expected)


def test_normalised_weights_have_a_mean_of_one() -> None:
    """L13: over tokens, or over episodes."""
    episodes = torch.tensor([0, 1, 1, 1])
    by_token = importance_weights(
        log(1, 2, 1, 2), log(1, 1, 1, 1), episodes, level="token", max_weight=9.0, normalize=True
    )
    by_episode = importance_weights(
        log(1, 3, 1, 1), log(1, 1, 1, 1), episodes, level="sequence", max_weight=9.0, normalize=True
    )
    torch.testing.assert_close(by_token, torch.tensor([1, 2, 1, 2]).double() / 1.5)
    torch.testing.assert_close(by_episode, torch.tensor([0.5, 1.5, 1.5, 1.5]).double())


def test_weights_carry_no_gradient_and_do_not_overflow() -> None:
    """L13: log-ratios of a long episode are held to 20."""
    proximal = torch.zeros(100, requires_grad=True)
    episodes = torch.zeros(100, dtype=torch.int64)
    weights = importance_weights(proximal, proximal - 9.0, episodes, level="sequence", max_weight=math.inf)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.full((100,), math.exp(20)))


def test_icepop_keeps_a_weight_only_within_its_bounds() -> None:
    weights = icepop_weights(log(0.4, 0.5, 1.0, 2.0, 2.1), log(1, 1, 1, 1, 1), lower=0.5, upper=2.0)
    torch.testing.assert_close(weights, torch.tensor([0, 0.5, 1, 2, 0], dtype=torch.float64))


OPTIONS = [key.removeprefix("corr.rs.") for key in keys("corr.rs.") if "asym" not in key and "combo" not in key]


def inverse(bounds: str) -> str:
    """The oracle's bounds act on behaviour / proximal."""
    lower, upper = bounds.split("_")
    return f"{1 / float(upper)}_{1 / float(lower)}"


@pytest.mark.parametrize(
    ("key", "option", "bounds"),
    [
        *((name, name, inverse("0.7_1.5") if name.endswith("k1") else "0.08") for name in OPTIONS),
        ("token_k1_asym", "token_k1", inverse("0.5_1.1")),
        ("combo", "token_k1,seq_max_k3", inverse("0.6_1.6") + ",0.3"),
    ],
)
def test_rejections_equal_verls_with_inverted_k1_bounds(key: str, option: str, bounds: str) -> None:
    """L14."""
    mask = inputs("mask").bool()
    keep = rejection_mask(*policies(mask), option=option, bounds=bounds)
    assert torch.equal(keep, case(f"corr.rs.{key}", "mask")[mask].bool())


def test_k1_bounds_apply_to_the_ratio() -> None:
    """L14: upstream rejects 0.6 and keeps 1.6 under these bounds."""
    ratios = log(0.45, 0.6, 1.0, 1.6)
    keep = rejection_mask(ratios, log(1, 1, 1, 1), torch.arange(4), option="token_k1", bounds="0.5_1.2")
    assert keep.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("option", "bounds", "kept"),
    [
        ("seq_sum_k1", "0.5_2.0", [True, True, False, False]),  # products 1 and 9
        ("seq_mean_k1", "0.5_2.0", [True, True, False, False]),  # geometric means 1 and 3
        ("seq_mean_k1", "0.5_3.1", [True, True, True, True]),
        ("token_k1", "0.5_2.0", [False, False, False, False]),
        ("seq_max_k2", "0.7", [False, False, True, True]),  # log(4)^2 / 2 is 0.96, log(3)^2 / 2 is 0.60
        ("seq_mean_k1,seq_max_k2", "0.5_3.1,0.7", [False, False, True, True]),
    ],
)
def test_whole_episodes_are_rejected(option: str, bounds: str, kept: list[bool]) -> None:
    """L14; the first episode's ratios are 4 and 1/4, the second's 3 and 3."""
    keep = rejection_mask(log(4, 0.25, 3, 3), log(1, 1, 1, 1), torch.tensor([5, 5, 1, 1]), option=option, bounds=bounds)
    assert keep.tolist() == kept


@pytest.mark.parametrize(("option", "bounds"), [("token_k1", "1_2"), ("token_k1", "0.5_1"), ("token_k3", "0")])
def test_a_token_at_a_bound_is_kept(option: str, bounds: str) -> None:
    episodes = torch.zeros(2).long()
    assert rejection_mask(log(0.3, 0.7), log(0.3, 0.7), episodes, option=option, bounds=bounds).all()


@pytest.mark.parametrize(("option", "bounds"), [("token_k1", "0.1_9"), ("token_k2", "9"), ("token_k3", "9")])
def test_a_token_with_a_nan_log_prob_is_rejected(option: str, bounds: str) -> None:
    keep = rejection_mask(log(1, 1), log(float("nan"), 1), torch.zeros(2).long(), option=option, bounds=bounds)
    assert keep.tolist() == [False, True]


@pytest.mark.parametrize(
    ("option", "bounds", "text"),
    [
        ("token_k4", "0.1", "'token_k4' does not exist: join token, seq_sum"),
        ("seq_max_k1", "0.5_2", "seq_max_k1' does not exist"),
        ("token_k1", "2.0", "bound '2.0' of a k1 option: give the bounds of the ratio as lower_upper"),
        ("token_k1", "2_0.5", "bound '2_0.5' of a k1 option"),
        ("token_k2", "much", "a rejection bound is 'much': it must be a valid number"),
        ("token_k3", "-1", "a rejection bound is '-1': it must be greater than or equal to 0"),
        ("token_k2", "nan", "a rejection bound is 'nan': it must be a finite number"),
        ("token_k1", "0.5_nan", "it must be a finite number"),
        ("token_k2,token_k3", "0.1", "has 2 options, '0.1' 1 bounds: give one bound per option"),
    ],
)
def test_invalid_options_and_bounds_are_errors(option: str, bounds: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rejection_mask(log(1.0), log(1.0), torch.zeros(1, dtype=torch.int64), option=option, bounds=bounds)


def test_only_episodes_with_negative_advantage_and_large_kl_are_masked() -> None:
    """Episodes: negative and drifted, negative and approached, positive, neutral, and drifted as far as allowed."""
    drifted = drifted_episodes(
        torch.tensor([-1.0, -1.0, 1.0, -1.0, -1.0, -0.5]),
        torch.zeros(6),
        torch.tensor([-1.0, -1.0, -1.0, 1.0, 0.0, -1.0]),
        torch.tensor([0, 0, 1, 2, 3, 4]),
        max_kl=0.5,
    )
    assert drifted.tolist() == [True, True, False, False, False, False]


def test_an_empty_step_has_no_weights() -> None:
    empty, episodes = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    weights = importance_weights(empty, empty, episodes, level="sequence", max_weight=2.0, normalize=True)
    assert weights.shape == (0,)
    assert rejection_mask(empty, empty, episodes, option="seq_max_k2", bounds="1").shape == (0,)
