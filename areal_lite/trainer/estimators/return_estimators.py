"""Estimators of a token's advantage from the rewards that follow it in its episode.

The sums run over trained tokens: tool tokens between two turns neither end a sum nor count in its discount. An
episode that was cut into several sequences is discounted along all of its tokens, sequence after sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from areal_lite.errors import ConfigError
from areal_lite.trainer.estimators.grouping import Grouping, whiten
from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs

ENERGY_FLOOR = 1e-8  # added to the sum of weights at a position, as in verl


def check_discount(discount: float, unit: str) -> None:
    """Raise a ConfigError unless the discount per ``unit`` (token, turn) lies in 0 to 1."""
    if not 0 <= discount <= 1:
        raise ConfigError(f"trainer.advantage_kwargs: the discount per {unit} is {discount}: use 0 to 1")


def discounted_sums(values: Tensor, episodes: Tensor, discount: float) -> Tensor:
    """Return each token's value ``[T]`` plus the discounted values after it in its episode. Each pass doubles the reach
    of a sum, so an episode of ``L`` tokens takes ``log2(L)`` passes, and rounding errors grow with that many additions.
    Values ``[1, 1, 1, 5]`` of episodes ``[0, 0, 0, 1]`` with a discount of 0.5 give ``[1.75, 1.5, 1, 5]``."""
    check_discount(discount, "token")
    sums = values.clone()
    longest = int(torch.bincount(episodes).max()) if len(episodes) else 0
    reach = 1
    while reach < longest:
        # where, not a product: a NaN or inf must stay in its episode.
        later = torch.where(episodes[reach:] == episodes[:-reach], sums[reach:], 0.0)
        sums[:-reach].add_(later, alpha=discount**reach)
        reach *= 2
    return sums


def next_values(values: Tensor, episodes: Tensor) -> Tensor:
    """Return ``[T]``, the value of the next token of the same episode; 0 at an episode's end."""
    result = torch.zeros_like(values)
    result[:-1] = torch.where(episodes[1:] == episodes[:-1], values[1:], 0.0)
    return result


def gae(inputs: EstimatorInputs, *, gamma: float = 1.0, lam: float = 1.0) -> Estimate:
    """Return generalized advantages, whitened over the batch; returns are values plus unwhitened advantages. ``gamma``
    discounts per token; ``lam`` 0 trusts the critic after one token, 1 the rewards to the end. The order of a fork's
    branches counts: each continues with the value and rewards of the next. Source: arXiv:1506.02438."""
    values = inputs.needed("values")
    errors = inputs.token_rewards + gamma * next_values(values, inputs.episodes) - values
    advantages = discounted_sums(errors, inputs.episodes, gamma * lam)
    return Estimate(whiten(advantages), advantages + values)


def reinforce(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Estimate:
    """Return the returns, discounted by ``gamma`` per token. Source: Williams, "Simple statistical gradient-following
    algorithms" (1992)."""
    returns = discounted_sums(inputs.token_rewards, inputs.episodes, gamma)
    return Estimate(returns, returns)


def reinforce_plus_plus(inputs: EstimatorInputs, *, gamma: float = 1.0) -> Estimate:
    """Return the returns, discounted by ``gamma`` per token and whitened over the batch. Source: arXiv:2501.03262."""
    returns = discounted_sums(inputs.token_rewards, inputs.episodes, gamma)
    return Estimate(whiten(returns), returns)


def remax(inputs: EstimatorInputs) -> Estimate:
    """Return the sum of the rewards that follow, minus the reward of the greedy answer. Source: arXiv:2310.10505."""
    returns = discounted_sums(inputs.token_rewards, inputs.episodes, 1.0)
    return Estimate(returns - inputs.per_token(inputs.needed("baselines")), returns)


def optimal_token_baseline(inputs: EstimatorInputs, *, credit_lone_tail: bool = False) -> Estimate:
    """Return each token's return minus the weighted mean return at the same position of the group's episodes. A token's
    weight is the sum of the squared gradient norms of its episode up to it, estimated as ``1 - 2 p + sum of squared
    probabilities``. Where all episodes that reach a position have the same return there, or only one reaches it, the
    advantage is exactly 0; ``credit_lone_tail`` uses the return where only the longest one does. Source:
    arXiv:2602.07078."""
    episodes = inputs.episodes
    returns = discounted_sums(inputs.token_rewards, episodes, 1.0)
    norms = 1 - 2 * inputs.needed("proximal_logprobs").exp() + inputs.needed("sum_squared_probs")
    norms = hardshrink(norms, 1e-6)  # a certain token's norm is 0; rounding may leave it slightly above or below
    if inputs.importance_weights is not None:
        norms = norms * inputs.importance_weights.square()
    energy = discounted_sums(norms.flip(0), episodes.flip(0), 1.0).flip(0)

    groups = Grouping.by_id(inputs.group_ids, episodes.device)
    positions = _positions(inputs, groups)
    baselines = positions.sums(returns * energy) / (positions.sums(energy) + ENERGY_FLOOR)
    varies = positions.spread(positions.varies(returns))
    advantages = torch.where(varies, returns - positions.spread(baselines), 0.0)
    if credit_lone_tail:
        in_group = groups.spread(groups.size > 1).index_select(0, episodes)
        advantages = torch.where(positions.spread(positions.size == 1) & in_group, returns, advantages)
    return Estimate(advantages.to(returns.dtype), returns)


def _positions(inputs: EstimatorInputs, groups: Grouping) -> Grouping:
    """Return the tokens by (group, position in the episode)."""
    lengths = inputs.lengths()
    longest = torch.zeros_like(groups.size).scatter_reduce_(0, groups.group, lengths, "amax")
    first_token, first_position = lengths.cumsum(0) - lengths, longest.cumsum(0) - longest
    shift = first_position[groups.group] - first_token
    tokens = torch.arange(len(inputs.episodes), device=inputs.episodes.device)
    return Grouping.numbered(tokens + shift.index_select(0, inputs.episodes))
