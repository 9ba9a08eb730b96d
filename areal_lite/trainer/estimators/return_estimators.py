"""Estimators of a token's advantage from what its row earned from there on.

The sums run over trained tokens: a tool's answer between two turns neither ends them nor is discounted over.
"""

from __future__ import annotations

from areal_lite.trainer.estimators.discounting import discounted_sums, following
from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs
from areal_lite.trainer.estimators.normalize import whiten


def gae(inputs: EstimatorInputs, *, gamma: float = 1.0, lam: float = 1.0) -> Estimate:
    """Return generalized advantages, whitened over the batch; returns are values plus advantages before that.

    Args:
        gamma: Discount per token.
        lam: 0 trusts the critic after one token, 1 the rewards to the end.

    Raises:
        ConfigError: If there are no values.

    Source: arXiv:1506.02438.
    """
    values = inputs.needed("values")
    surprises = inputs.token_rewards + gamma * following(values, inputs.rows) - values
    advantages = discounted_sums(surprises, inputs.rows, gamma * lam)
    return Estimate(whiten(advantages), advantages + values)


def reinforce(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Estimate:
    """Return discounted returns as they are.

    Args:
        gamma: Discount per token.

    Source: Williams, "Simple statistical gradient-following algorithms" (1992).
    """
    returns = discounted_sums(inputs.token_rewards, inputs.rows, gamma)
    return Estimate(returns, returns)


def reinforce_plus_plus(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Estimate:
    """Return discounted returns, whitened over the batch.

    Args:
        gamma: Discount per token.

    Source: arXiv:2501.03262.
    """
    returns = discounted_sums(inputs.token_rewards, inputs.rows, gamma)
    return Estimate(whiten(returns), returns)


def remax(inputs: EstimatorInputs) -> Estimate:
    """Return what is still earned, less the reward of the greedy answer.

    Raises:
        ConfigError: If there are no baselines.

    Source: arXiv:2310.10505.
    """
    returns = discounted_sums(inputs.token_rewards, inputs.rows, 1.0)
    return Estimate(returns - inputs.per_token(inputs.needed("baselines")), returns)
