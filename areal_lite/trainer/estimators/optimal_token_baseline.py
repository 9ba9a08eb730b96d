"""The baseline of least variance for each place in a group's rows."""

from __future__ import annotations

import torch
from torch.nn.functional import hardshrink

from areal_lite.trainer.estimators.discounting import discounted_sums
from areal_lite.trainer.estimators.grouping import Grouping
from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs

ENERGY_FLOOR = 1e-8
"""Added to the sum of weights at a place, as verl does."""


def optimal_token_baseline(inputs: EstimatorInputs, *, credit_lone_tail: bool = False) -> Estimate:
    """Return what is still earned, less its weighted mean over the tokens at the same place of the group's rows.

    A token weighs as much as the squared gradient norms of its row up to it, for which
    ``1 - 2 p + sum of squared probabilities`` stands. Places count trained tokens, so answers of tools of different
    length do not shift the turns against each other. Where all rows that reach a place still earn the same, or
    only one reaches it: exactly 0.

    Args:
        credit_lone_tail: Tokens that only the longest row of a group reaches get what is still earned, not 0.

    Raises:
        ConfigError: If there are no proximal log-probs or sums of squared probabilities.

    Source: arXiv:2602.07078.
    """
    rows = inputs.rows
    returns = discounted_sums(inputs.token_rewards, rows, 1.0)
    norms = 1 - 2 * inputs.needed("proximal_logprobs").exp() + inputs.needed("sum_squared_probs")
    norms = hardshrink(norms, 1e-6)  # a sure token's is 0; rounding would leave it on either side
    if inputs.importance_weights is not None:
        norms = norms * inputs.importance_weights.square()
    energy = discounted_sums(norms.flip(0), rows.flip(0), 1.0).flip(0)

    groups = Grouping.by_id(inputs.group_ids, rows.device)
    places = _places(inputs, groups)
    baselines = places.sums(returns * energy) / (places.sums(energy) + ENERGY_FLOOR)
    advantages = torch.where(places.spread(places.varies(returns)), returns - places.spread(baselines), 0.0)
    if credit_lone_tail:
        lone = places.spread(places.size == 1) & groups.spread(groups.size > 1).index_select(0, rows)
        advantages = torch.where(lone, returns, advantages)
    return Estimate(advantages.to(returns.dtype), returns)


def _places(inputs: EstimatorInputs, groups: Grouping) -> Grouping:
    """Return the tokens by (group, place in the row)."""
    lengths = inputs.lengths()
    longest = torch.zeros_like(groups.size).scatter_reduce_(0, groups.group, lengths, "amax")
    first_token, first_place = lengths.cumsum(0) - lengths, longest.cumsum(0) - longest
    shift = first_place[groups.group] - first_token
    tokens = torch.arange(len(inputs.rows), device=inputs.rows.device)
    return Grouping.numbered(tokens + shift.index_select(0, inputs.rows))
