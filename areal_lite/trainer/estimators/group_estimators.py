"""Estimators that compare the episodes of a group, or each turn with those at its index in the other episodes.

An episode's reward is the sum of its token rewards; all its tokens, or all credited to a turn, get the same advantage.
A group of one and a group of equal rewards do not say which answer was better: their advantages are exactly 0. So are
those of turns at an index that fewer than two episodes of the group reach. The baseline of an index counts every
episode once, however many turns of that index its tree has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.trainer.estimators.grouping import Grouping, whiten
from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs, Turns
from areal_lite.trainer.estimators.return_estimators import check_discount

STD_FLOOR = 1e-6  # added to a group's standard deviation, as in verl


def grpo(inputs: EstimatorInputs, *, divide_by_std: bool = True) -> Estimate:
    """Return rewards minus their group's mean, divided by the group's unbiased standard deviation if ``divide_by_std``.
    Rewards ``[1, 0, 0, 1]`` of one group give ``[0.866, -0.866, -0.866, 0.866]``. Source: DeepSeekMath
    (arXiv:2402.03300)."""
    groups = _groups(inputs)
    advantages = groups.centred(inputs.episode_rewards())
    if divide_by_std:
        advantages = advantages / (groups.spread(groups.deviations(advantages)) + STD_FLOOR)
    return Estimate(inputs.per_token(advantages))


def dr_grpo(inputs: EstimatorInputs) -> Estimate:
    """Return rewards minus their group's mean. Source: Dr. GRPO (arXiv:2503.20783)."""
    return grpo(inputs, divide_by_std=False)


def grpo_passk(inputs: EstimatorInputs, *, divide_by_std: bool = True) -> Estimate:
    """Return, for the best episode of each group, its reward minus the second best; 0 for the others. Source:
    arXiv:2503.19595."""
    groups, rewards = _groups(inputs), inputs.episode_rewards()
    by_reward = rewards.argsort()
    ranked = by_reward[groups.group[by_reward].argsort(stable=True)]  # group by group, rewards rising
    last = groups.size.cumsum(0) - 1
    several = groups.size > 1
    best, second = ranked[last[several]], ranked[last[several] - 1]
    advantages = torch.zeros_like(rewards)
    advantages[best] = rewards[best] - rewards[second]
    if divide_by_std:
        advantages = advantages / (groups.spread(groups.deviations(groups.centred(rewards))) + STD_FLOOR)
    return Estimate(inputs.per_token(advantages))


def rloo(inputs: EstimatorInputs) -> Estimate:
    """Return rewards minus the mean of the group's other episodes (leave-one-out). Source: arXiv:2402.14740."""
    groups = _groups(inputs)
    factor = groups.size.double() / (groups.size - 1).clamp(min=1)
    return Estimate(inputs.per_token(groups.centred(inputs.episode_rewards()) * groups.spread(factor)))


def opo(inputs: EstimatorInputs) -> Estimate:
    """Return rewards minus the group's mean weighted by length, the on-policy baseline of least variance. Source:
    arXiv:2505.23585."""
    return Estimate(inputs.per_token(_groups(inputs).centred(inputs.episode_rewards(), inputs.lengths())))


def gpg(inputs: EstimatorInputs, *, f_norm: float = 1.0) -> Estimate:
    """Return centred rewards times episodes / episodes with a nonzero reward, as in verl, divided by ``f_norm``. The
    paper also leaves out groups whose answers are all right. Source: arXiv:2504.02546."""
    rewards = inputs.episode_rewards()
    factor = len(rewards) / rewards.count_nonzero().clamp(min=1)
    return Estimate(inputs.per_token(_groups(inputs).centred(rewards) * factor / f_norm))


def reinforce_plus_plus_baseline(inputs: EstimatorInputs) -> Estimate:
    """Return centred rewards whitened over the batch's tokens; groups of equal rewards stay at 0. Source:
    arXiv:2501.03262."""
    groups, rewards = _groups(inputs), inputs.episode_rewards()
    whitened = whiten(inputs.per_token(groups.centred(rewards)))
    return Estimate(whitened * inputs.per_token(groups.spread(groups.varies(rewards))))


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


def _groups(inputs: EstimatorInputs) -> Grouping:
    return Grouping.by_id(inputs.group_ids, inputs.episodes.device)
