"""Estimates of KL(policy || reference) from sampled tokens, one value per token.

Only k1 and k3 are unbiased as values (k3 is never negative), and only k2 has the KL's gradient when
differentiated per token; hence the straight-through forms. Source: Schulman, "Approximating KL
divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from areal_lite.errors import ConfigError
from areal_lite.trainer.objectives.log_ratio import clamped_log_ratio

MAX_K3 = 10.0
"""Nats. k3 grows with the exponential of the difference; one stray token must not be the whole sum."""


def _k1(policy: Tensor, reference: Tensor) -> Tensor:
    return policy - reference


def _abs(policy: Tensor, reference: Tensor) -> Tensor:
    return (policy - reference).abs()


def _k2(policy: Tensor, reference: Tensor) -> Tensor:
    return (policy - reference).square() / 2


def _k3(policy: Tensor, reference: Tensor) -> Tensor:
    difference = clamped_log_ratio(reference, policy)
    return (difference.expm1() - difference).clamp(max=MAX_K3)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": _k1, "kl": _k1, "abs": _abs, "k2": _k2, "mse": _k2, "k3": _k3, "low_var_kl": _k3,
}  # fmt: skip


def kl_penalty(
    policy: Tensor, reference: Tensor, estimator: str, *, behaviour: Tensor | None = None
) -> Tensor:
    """Return each token's estimate of KL(policy || reference).

    With ``policy - reference = 0.5`` k1 is 0.5, k2 0.125, k3 0.1065.

    Args:
        policy: ``[T]`` log-probs (nats); may carry gradient.
        reference: ``[T]`` log-probs (nats).
        estimator: ``k1`` (or ``kl``), ``abs``, ``k2`` (``mse``), ``k3`` (``low_var_kl``). A ``+`` behind it takes
            its value but k2's gradient.
        behaviour: ``[T]`` log-probs the tokens were sampled with. Given, each token is weighted with
            ``policy / behaviour``, gradient included, which makes value and gradient unbiased for tokens
            that another policy sampled (DeepSeek-V3.2, arXiv:2512.02556).

    Returns:
        ``[T]`` nats.

    Raises:
        ConfigError: If there is no such estimator.
    """
    estimate = KL_ESTIMATORS.get(estimator.removesuffix("+"))
    if estimate is None:
        raise ConfigError(
            f"KL estimator {estimator!r} does not exist: use one of {', '.join(KL_ESTIMATORS)}, with a + behind it "
            "for the gradient of k2"
        )
    kl = estimate(policy, reference)
    if estimator.endswith("+"):
        k2 = _k2(policy, reference)
        kl = kl.detach() + (k2 - k2.detach())
    return kl if behaviour is None else kl * clamped_log_ratio(policy, behaviour).exp()
