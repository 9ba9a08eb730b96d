"""Log-ratios of two policies, and estimates of KL(policy || reference) from sampled tokens, one value per token.

Only k1 and k3 are unbiased as values (k3 is never negative), and only k2 has the gradient of the KL when
differentiated per token; hence the straight-through forms. A step's penalty uses the coefficient from before the step;
the caller adapts it afterwards. Source: Schulman, "Approximating KL divergence" (2020).
"""

import operator
from collections.abc import Callable
import torch
from torch import Tensor
from areal_lite.trainer.objectives.aggregation import token_weights

MAX_LOG_RATIO = 20.0  # Nats. Log-ratios are clamped to this before exp, so that no ratio overflows: exp(20) is 5e8.
MAX_K3 = 10.0  # Nats. k3 grows with the exponential of the difference; a single token must not dominate the sum.
MAX_RELATIVE_ERROR = 0.2  # Bound on the relative error of the KL in one update of an adapted coefficient.
ROUNDING = 2e-5  # Nats. Smaller differences of float32 log-probs have the sign of their rounding errors.


def clamped_log_ratio(over: Tensor, under: Tensor) -> Tensor:
    """Return ``[T]``, ``over - under`` in nats clamped to ``+-MAX_LOG_RATIO``; no gradient flows beyond it."""
    return (over - under).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _abs(policy: Tensor, reference: Tensor) -> Tensor:
    """Return the estimate, without a gradient where rounding decides its sign, as while policy equals reference."""
    difference = policy - reference
    return torch.where(difference.abs() > ROUNDING, difference, difference.detach()).abs()


def _k2(policy: Tensor, reference: Tensor) -> Tensor:
    return (policy - reference).square() / 2


def _k3(policy: Tensor, reference: Tensor) -> Tensor:
    difference = clamped_log_ratio(reference, policy)
    return (difference.expm1() - difference).clamp(max=MAX_K3)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": operator.sub, "kl": operator.sub, "k2": _k2, "mse": _k2, "k3": _k3, "low_var_kl": _k3,
    "abs": _abs,
}  # fmt: skip


def kl_penalty(policy: Tensor, reference: Tensor, estimator: str, *, behaviour: Tensor | None = None) -> Tensor:
    """Return ``[T]``, each token's estimate of KL(policy || reference) in nats, from log-probs.

    With ``policy - reference = 0.5`` k1 is 0.5, k2 0.125, k3 0.1065. An ``estimator`` with a ``+`` appended keeps its
    value but has the gradient of k2. Given the ``behaviour`` log-probs, each token is weighted by ``policy /
    behaviour``, gradient included, which makes both unbiased for tokens of another policy (arXiv:2512.02556)."""
    kl = KL_ESTIMATORS[estimator.removesuffix("+")](policy, reference)
    if estimator.endswith("+"):
        k2 = _k2(policy, reference)
        kl = kl.detach() + (k2 - k2.detach())
    return kl if behaviour is None else kl * clamped_log_ratio(policy, behaviour).exp()


def adapted_coef(coef: float, current_kl: float, num_episodes: int, *, target: float, horizon: float) -> float:
    """Return the coefficient of the KL penalty after a step: higher if the step's :func:`mean_kl` was above the target
    (nats per token), else lower, over ``horizon`` episodes. Source: Ziegler et al. (arXiv:1909.08593)."""
    error = min(max(current_kl / target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coef * (1 + error * num_episodes / horizon)


def mean_kl(kl: Tensor, episodes: Tensor) -> float:
    """Return the mean over episodes of their mean ``kl [T]`` (nats per token); episodes without tokens do not count."""
    return (kl * token_weights("seq-mean-token-mean", episodes)).sum().item()
