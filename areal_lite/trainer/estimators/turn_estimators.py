"""Estimators that compare turns: each turn with the turns at the same index in the group's other episodes.

All tokens credited to a turn get its advantage. The baseline of an index counts every episode once, however many
turns of that index its tree has. Where fewer than two episodes of the group reach an index, there is nothing to
compare with and the advantage is exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.trainer.estimators.group_estimators import STD_FLOOR
from areal_lite.trainer.estimators.grouping import Grouping
from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs, Turns
from areal_lite.trainer.estimators.return_estimators import check_discount


def turn_grpo(inputs: EstimatorInputs, *, divide_by_std: bool = True) -> Estimate:
    """Return each turn's reward minus the group's baseline at its index, divided by the deviation there.

    The baseline is the mean, over the group's episodes that reach the index, of each episode's mean reward at it. The
    deviation is the unbiased one around that baseline, with the mean square of an episode's turns for each episode.
    Turn rewards ``[1, 0]``, ``[0, 1]`` and ``[0]`` of three episodes give ``[1.155, -0.707]``, ``[-0.577, 0.707]`` and
    ``[-0.577]``. If the second turn of the first episode was sampled twice, with rewards 0 and 1, the baseline of index
    1 is 3/4, the mean of 1/2 and 1. Source: MT-GRPO (arXiv:2505.11821), without its outcome term; the weighting of
    trees is ours."""
    return _compare(inputs, inputs.turn_rewards(), divide_by_std=divide_by_std)


def turn_returns(inputs: EstimatorInputs, *, gamma: float = 1.0, divide_by_std: bool = True) -> Estimate:
    """Return each turn's discounted return minus the group's baseline at its index, as :func:`turn_grpo` does. The
    return of a turn is its reward plus ``gamma`` times the mean return of its children: a turn that was continued in
    several ways was still one decision. Source: GTPO (arXiv:2511.14846); the mean over continuations is ours."""
    check_discount(gamma, "turn")
    returns = _discounted_returns(inputs.needed("turns"), inputs.turn_rewards(), gamma)
    return _compare(inputs, returns, divide_by_std=divide_by_std)


def _discounted_returns(turns: Turns, rewards: Tensor, gamma: float) -> Tensor:
    """Return ``[S]`` float64, reward plus ``gamma`` times the mean return of the children, from the leaves upwards."""
    has_parent = turns.parents >= 0
    num_children = torch.bincount(turns.parents[has_parent], minlength=len(rewards)).clamp(min=1)
    returns = rewards.clone()
    for index in torch.unique(turns.index).flip(0).tolist():  # children have a larger index than their parent
        children = (has_parent & (turns.index == index)).nonzero()[:, 0]
        parents = turns.parents[children]
        returns.index_add_(0, parents, gamma * returns[children] / num_children[parents])
    return returns


def _compare(inputs: EstimatorInputs, values: Tensor, *, divide_by_std: bool) -> Estimate:
    turns = inputs.needed("turns")
    width = int(turns.index.max()) + 1 if len(values) else 1
    visits, visit = torch.unique(turns.episodes * width + turns.index, return_inverse=True)
    by_visit = Grouping.numbered(visit)  # the turns of one episode at one index, which count as one
    group = Grouping.by_id(inputs.group_ids, values.device).group[visits // width]
    places = Grouping.numbered(group * width + visits % width)  # the visits of one group at one index

    baselines = places.spread(places.means(by_visit.means(values)))
    compared = places.spread(places.size) > 1
    advantages = torch.where(by_visit.spread(compared), values - by_visit.spread(baselines), 0.0)
    if divide_by_std:
        variances = places.sums(by_visit.means(advantages.square())) / (places.size - 1).clamp(min=1)
        advantages = advantages / (by_visit.spread(places.spread(variances.sqrt())) + STD_FLOOR)
    return Estimate(advantages.to(inputs.token_rewards.dtype).index_select(0, turns.of_token))
