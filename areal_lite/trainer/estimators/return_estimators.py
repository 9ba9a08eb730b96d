"""Estimators of a token's advantage from the rewards that follow it in its episode.

The sums run over trained tokens: tool tokens between two turns neither end a sum nor count in its discount. An
episode that was cut into several sequences is discounted along all of its tokens, sequence after sequence.
"""

from __future__ import annotations

from areal_lite.trainer.estimators.discounting import discounted_sums, next_values
from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs
from areal_lite.trainer.estimators.normalize import whiten


def gae(inputs: EstimatorInputs, *, gamma: float = 1.0, lam: float = 1.0) -> Estimate:
    """Return generalized advantages, whitened over the batch; returns are values plus unwhitened advantages.

    Cutting an episode into other sequences changes nothing while its tokens keep their order. The order of a fork's
    branches counts: each continues with the value and rewards of the next.

    Args:
        gamma: Discount per token.
        lam: 0 trusts the critic after one token, 1 the rewards to the end.

    Raises:
        ConfigError: If there are no values.

    Source: arXiv:1506.02438.
    """
    values = inputs.needed("values")
    errors = inputs.token_rewards + gamma * next_values(values, inputs.episodes) - values
    advantages = discounted_sums(errors, inputs.episodes, gamma * lam)
    return Estimate(whiten(advantages), advantages + values)


def reinforce(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Estimate:
    """Return the discounted returns unchanged.

    Args:
        gamma: Discount per token.

    Source: Williams, "Simple statistical gradient-following algorithms" (1992).
    """
    returns = discounted_sums(inputs.token_rewards, inputs.episodes, gamma)
    return Estimate(returns, returns)


def reinforce_plus_plus(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Estimate:
    """Return the discounted returns, whitened over the batch.

    Args:
        gamma: Discount per token.

    Source: arXiv:2501.03262.
    """
    returns = discounted_sums(inputs.token_rewards, inputs.episodes, gamma)
    return Estimate(whiten(returns), returns)


def remax(inputs: EstimatorInputs) -> Estimate:
    """Return the sum of the rewards that follow, minus the reward of the greedy answer.

    Raises:
        ConfigError: If there are no baselines.

    Source: arXiv:2310.10505.
    """
    returns = discounted_sums(inputs.token_rewards, inputs.episodes, 1.0)
    return Estimate(returns - inputs.per_token(inputs.needed("baselines")), returns)
