"""The baseline of least variance for each token position in a group's episodes."""

from __future__ import annotations

import torch
from torch.nn.functional import hardshrink

from areal_lite.trainer.estimators.discounting import discounted_sums
from areal_lite.trainer.estimators.grouping import Grouping
from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs

ENERGY_FLOOR = 1e-8
"""Added to the sum of weights at a position, as in verl."""


def optimal_token_baseline(inputs: EstimatorInputs, *, credit_lone_tail: bool = False) -> Estimate:
    """Return each token's return minus the weighted mean return at the same position of the group's episodes.

    A token's weight is the sum of the squared gradient norms of its episode up to it, estimated as
    ``1 - 2 p + sum of squared probabilities``. Positions count trained tokens, so tool answers of different length
    do not shift the turns against each other. Where all episodes that reach a position have the same return there,
    or only one reaches it, the advantage is exactly 0.

    Args:
        credit_lone_tail: At positions that only the group's longest episode reaches, use the return, not 0.

    Raises:
        ConfigError: If there are no proximal log-probs or sums of squared probabilities.

    Source: arXiv:2602.07078.
    """
    episodes = inputs.episodes
    returns = discounted_sums(inputs.token_rewards, episodes, 1.0)
    norms = 1 - 2 * inputs.needed("proximal_logprobs").exp() + inputs.needed("sum_squared_probs")
    norms = hardshrink(
        norms, 1e-6
    )  # a certain token's norm is 0; rounding may leave it slightly above or below
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
