"""L11: the critic's loss against verl and RL2."""

from __future__ import annotations
import pytest
import torch
from areal_lite.trainer.objectives.aggregation import aggregate, token_weights
from areal_lite.trainer.objectives.policy_loss import value_loss
from tests.trainer.oracle_cases import DTYPES, assert_matches, case, inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("clip", [0.2, 0.5])
def test_loss_and_gradient_equal_verls(clip: float, mode: str, dtype: torch.dtype) -> None:
    """L11."""
    mask = inputs("mask", dtype).bool()
    values = inputs("vpreds", dtype)[mask].requires_grad_()
    terms = value_loss(values, inputs("values", dtype)[mask], inputs("returns", dtype)[mask], clip=clip)
    loss = aggregate(terms.losses, token_weights(mode, mask.nonzero()[:, 0]))
    (gradient,) = torch.autograd.grad(loss, values)
    padded = torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, gradient)

    key = f"value_loss.clip{clip}.{mode}"
    for ours, field in ((loss, "loss"), (padded, "grad")):
        expected = case(key, field, dtype)
        if mode == "seq-mean-token-mean":  # the oracle adds 1e-8 to the token count it divides an episode by
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=2e-8)
        else:
            assert_matches(ours, expected)
    fraction = terms.statistics["value_clip_fraction"].mean().item()
    assert fraction == pytest.approx(case(key, "clipfrac", dtype), rel=1e-6)


def test_losses_equal_half_of_rl2s() -> None:
    mask = inputs("mask").bool()
    terms = value_loss(inputs("vpreds")[mask], inputs("values")[mask], inputs("returns")[mask], clip=0.5)
    assert_matches(2 * terms.losses, case("rl2.critic", "loss_mat")[mask])
    assert torch.equal(terms.statistics["value_clip_fraction"].bool(), case("rl2.critic", "clip")[mask].bool())


def test_without_clipping_it_is_half_the_squared_error() -> None:
    terms = value_loss(torch.tensor([3.0, 0.0]), torch.zeros(2), torch.tensor([1.0, 1.0]))
    assert terms.losses.tolist() == [2.0, 0.5]
    assert terms.statistics["value_clip_fraction"].tolist() == [0.0, 0.0]
