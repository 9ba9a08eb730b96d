"""L10: one weight per token; the loss of an update does not depend on how it is cut."""

from __future__ import annotations
from collections.abc import Callable
from typing import Any, get_args
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from areal_lite.config.trainer_config import AggregationMode
from areal_lite.trainer.objectives.aggregation import (
    aggregate,
    episode_max,
    episode_mean,
    episode_sum,
    token_weights,
)
from tests.trainer.oracle_cases import DTYPES, assert_matches, case, inputs

MODES = get_args(AggregationMode)
NORM = "seq-mean-token-sum-norm"


def oracle_loss(mask_name: str, mode: AggregationMode, dtype: torch.dtype, **counts: Any) -> tuple[Tensor, Tensor]:
    """Return the aggregate of the oracle's log-probs, and its gradient as ``[B, T]``."""
    mask = inputs(mask_name, dtype).bool()
    losses = inputs("log_prob", dtype)[mask].requires_grad_()
    loss = aggregate(losses, token_weights(mode, mask.nonzero()[:, 0], **counts))
    (gradient,) = torch.autograd.grad(loss, losses)
    return loss.detach(), torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, gradient)


def check(key: str, ours: tuple[Tensor, Tensor], *, factor: float = 1.0) -> None:
    for value, field in zip(ours, ("loss", "grad"), strict=True):
        expected = case(key, field, value.dtype)
        if "seq-mean-token-mean" in key and value.dtype == torch.float64:
            # The oracle adds 1e-8 to the token count it divides an episode by.
            torch.testing.assert_close(value * factor, expected, rtol=1e-8, atol=1e-8)
        else:
            assert_matches(value * factor, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("mask_name", ["mask", "mask_mt", "mask_dead"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_equal_the_oracles(mode: AggregationMode, mask_name: str, dtype: torch.dtype) -> None:
    """L10; an episode without trained tokens counts in no mean. The oracle's constant is its padded width."""
    counts = {"scale": 17} if mode == NORM else {}
    check(f"agg.{mode}.{mask_name}", oracle_loss(mask_name, mode, dtype, **counts))


@pytest.mark.parametrize("mode", MODES)
def test_only_the_norm_mode_uses_a_given_scale(mode: AggregationMode) -> None:
    check(f"agg.{mode}.scale100", oracle_loss("mask", mode, torch.float64, scale=100))


def test_the_norm_sums_over_ranks_and_needs_no_factor() -> None:
    """L10: two ranks with the same episodes have twice the loss of one; upstream, averaging, gives half of that."""
    episodes, losses = torch.tensor([0, 0, 1]), torch.tensor([1.0, 2.0, 3.0])
    one = aggregate(losses, token_weights(NORM, episodes, scale=4))
    both = aggregate(losses.repeat(2), token_weights(NORM, torch.cat((episodes, episodes + 2)), scale=4))
    assert (one.item(), both.item()) == (1.5, 3.0)


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 1 / 2, 1 / 2]),
        ("seq-mean-token-mean", [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        (NORM, [1 / 3, 1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_weights_by_hand(mode: AggregationMode, weights: list[float]) -> None:
    episodes = torch.tensor([9, 4, 4, 4])
    torch.testing.assert_close(token_weights(mode, episodes, scale=3), torch.tensor(weights, dtype=torch.float64))


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    piece=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    mode=st.sampled_from(MODES),
)
def test_loss_and_gradient_do_not_depend_on_the_cut(
    lengths: list[int], piece: list[int], mode: AggregationMode
) -> None:
    """L10, R21: episodes spread at random over four micro-batches or ranks, some of them empty."""
    episodes = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    values = torch.linspace(-1.0, 2.0, len(episodes), dtype=torch.float64, requires_grad=True)
    weights = token_weights(mode, episodes, scale=7)
    whole = aggregate(values.square(), weights)

    pieces = torch.tensor(piece)[episodes]
    cut = sum(
        (aggregate(values[pieces == i].square(), weights[pieces == i]) for i in range(4)),
        start=torch.zeros((), dtype=torch.float64),
    )

    torch.testing.assert_close(cut, whole)
    torch.testing.assert_close(torch.autograd.grad(cut, values)[0], torch.autograd.grad(whole, values)[0])


@given(
    cuts=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=6),
    mode=st.sampled_from(MODES),
)
def test_sequences_of_an_episode_share_its_weight_by_their_trained_tokens(
    cuts: list[list[int]], mode: AggregationMode
) -> None:
    """Each episode is cut into sequences of these many tokens; its weight is that of the uncut episode."""
    lengths = torch.tensor([sum(sequences) for sequences in cuts])
    episodes = torch.arange(len(cuts)).repeat_interleave(lengths)
    weights = token_weights(mode, episodes, scale=7)
    for number, sequences in enumerate(cuts):
        own = weights[episodes == number]
        uncut = {
            "token-mean": sum(sequences) / len(episodes),
            "seq-mean-token-sum": sum(sequences) / len(cuts),
            "seq-mean-token-mean": 1 / len(cuts),
            NORM: sum(sequences) / 7,
        }[mode]
        for share, count in zip(own.split(sequences), sequences, strict=True):
            torch.testing.assert_close(share.sum().item(), uncut * count / sum(sequences))


def test_a_nan_at_a_token_of_weight_0_has_no_effect() -> None:
    """L10: neither into the loss nor into the gradients of losses, whatever the mode."""
    losses = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    loss = aggregate(losses, torch.tensor([0.5, 0.0, 0.5]))
    (gradient,) = torch.autograd.grad(loss, losses)
    assert (loss.item(), gradient.tolist()) == (2.0, [0.5, 0.0, 0.5])


@pytest.mark.parametrize("mode", MODES)
def test_an_update_without_tokens_has_a_loss_of_zero_that_backpropagates(mode: AggregationMode) -> None:
    """L10: upstream gives NaN."""
    losses = torch.zeros(0, requires_grad=True)
    loss = aggregate(losses, token_weights(mode, torch.zeros(0, dtype=torch.int64), scale=7))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, losses)[0].shape == (0,)


@pytest.mark.parametrize("mode", sorted(set(MODES) - {NORM}))
def test_entropy_is_averaged_like_a_loss(mode: AggregationMode) -> None:
    mask = inputs("mask").bool()
    entropy = case("entropy.from_logits", "value")[mask]
    loss = aggregate(-entropy, token_weights(mode, mask.nonzero()[:, 0]))
    torch.testing.assert_close(-loss, case(f"entropy.loss.{mode}", "loss"), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("over_episode", "expected"),
    [(episode_sum, [4.0, 5.0, 4.0]), (episode_mean, [2.0, 5.0, 2.0]), (episode_max, [3.0, 5.0, 3.0])],
)
def test_sums_means_and_maxima_of_episodes_reach_each_token(
    over_episode: Callable[[Tensor, Tensor], Tensor], expected: list[float]
) -> None:
    """Episode numbers are neither dense nor in order."""
    assert over_episode(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([8, 2, 8])).tolist() == expected
