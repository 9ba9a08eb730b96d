"""L12: KL estimates against verl and slime, values and gradients, and the straight-through forms."""

from __future__ import annotations
import pytest
import torch
from areal_lite.trainer.objectives.kl import KL_ESTIMATORS, kl_penalty
from tests.trainer.oracle_cases import DTYPES, assert_matches, case, inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_values_and_gradients_equal_verls(estimator: str, dtype: torch.dtype) -> None:
    """L12."""
    policy = inputs("log_prob", dtype).requires_grad_()
    kl = kl_penalty(policy, inputs("ref_log_prob", dtype), estimator)
    assert_matches(kl, case(f"kl.{estimator}", "value", dtype))
    assert_matches(torch.autograd.grad(kl.sum(), policy)[0], case(f"kl.{estimator}", "grad", dtype))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_values_equal_slimes(estimator: str, unbiased: bool) -> None:
    """slime works in float32."""
    behaviour = inputs("old_log_prob") if unbiased else None
    kl = kl_penalty(inputs("log_prob"), inputs("ref_log_prob"), estimator, behaviour=behaviour)
    expected = case(f"slime.kl.{estimator}{'.unbiased' * unbiased}", "value")
    mask = inputs("mask").bool()
    torch.testing.assert_close(kl[mask], expected[mask].double(), rtol=1e-5, atol=1e-6)


def test_estimators_with_a_plus_have_the_gradient_of_k2() -> None:
    """L12: upstream raises NotImplementedError; right is the value of k3 (or k1) with the gradient of k2."""
    policy = inputs("log_prob").requires_grad_()
    reference = inputs("ref_log_prob")
    for estimator in ("k1", "k3", "low_var_kl"):
        kl = kl_penalty(policy, reference, f"{estimator}+")
        assert_matches(kl, case(f"kl.{estimator}", "value"))
        assert_matches(torch.autograd.grad(kl.sum(), policy)[0], case("kl.k2", "grad"))


def test_the_unbiased_form_has_the_gradient_of_the_kl() -> None:
    """Three tokens, sampled by a third policy: the expectation over it has the value and gradient of the KL itself."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    behaviour = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    expected = (behaviour.exp() * kl_penalty(policy, reference, "k3", behaviour=behaviour)).sum()
    torch.testing.assert_close(expected, exact)
    torch.testing.assert_close(
        torch.autograd.grad(expected, logits, retain_graph=True), torch.autograd.grad(exact, logits)
    )


def test_a_penalty_in_the_reward_equals_verls() -> None:
    """V51: token rewards less beta times k1 of proximal against reference."""
    mask = inputs("mask")
    kl = kl_penalty(inputs("old_log_prob"), inputs("ref_log_prob"), "k1")
    rewards = inputs("rewards_outcome") - 0.05 * kl * mask
    assert_matches(rewards, case("kl.in_reward", "token_level_rewards"))


def test_k3_is_bounded_and_never_negative() -> None:
    """L12: one stray token is worth 10 nats at most."""
    assert kl_penalty(torch.tensor([0.0, -60.0, 60.0]), torch.zeros(3), "k3").tolist() == [0.0, 10.0, 10.0]
    tiny = torch.linspace(-1e-3, 1e-3, 1001)
    assert kl_penalty(tiny, torch.zeros(1001), "k3").min() >= 0


def test_abs_has_no_gradient_where_rounding_decides_the_sign() -> None:
    differences = torch.tensor([0.0, 1e-6, -1e-6, 1e-4, -1e-4])
    policy = differences.clone().requires_grad_()
    kl = kl_penalty(policy, torch.zeros(5), "abs")
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), differences.abs())
    assert policy.grad is not None
    assert policy.grad.tolist() == [0, 0, 0, 1, -1]
