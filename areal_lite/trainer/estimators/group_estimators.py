"""Estimators that compare the episodes of a group; all tokens of an episode get the same advantage.

An episode's reward is the sum of its token rewards. A group of one and a group of equal rewards do not say which
answer was better: their advantages are exactly 0.
"""

from __future__ import annotations

import torch

from areal_lite.trainer.estimators.grouping import Grouping, whiten
from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs

STD_FLOOR = 1e-6
"""Added to a group's standard deviation, as in verl."""


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


def _groups(inputs: EstimatorInputs) -> Grouping:
    return Grouping.by_id(inputs.group_ids, inputs.episodes.device)
