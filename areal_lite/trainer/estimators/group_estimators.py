"""Estimators that compare the rows of a group; every token of a row has the same advantage.

A row's reward is the sum of what its tokens earned. A group of one and a group of equal rewards say nothing about
which answer was better: exactly 0.
"""

from __future__ import annotations

import torch

from areal_lite.trainer.estimators.grouping import Grouping
from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs
from areal_lite.trainer.estimators.normalize import whiten

STD_FLOOR = 1e-6
"""Added to a group's standard deviation, as verl does."""


def grpo(inputs: EstimatorInputs, *, divide_by_std: bool = True) -> Estimate:
    """Return rewards centred on their group's mean, in units of its unbiased deviation.

    Rewards ``[1, 0, 0, 1]`` of one group give ``[0.866, -0.866, -0.866, 0.866]``.

    Args:
        divide_by_std: False leaves the centred reward, which is :func:`dr_grpo`.

    Source: DeepSeekMath (arXiv:2402.03300).
    """
    groups = _groups(inputs)
    advantages = groups.centred(inputs.row_rewards())
    if divide_by_std:
        advantages = advantages / (groups.spread(groups.deviations(advantages)) + STD_FLOOR)
    return Estimate(inputs.per_token(advantages))


def dr_grpo(inputs: EstimatorInputs) -> Estimate:
    """Return rewards centred on their group's mean.

    Source: Dr. GRPO (arXiv:2503.20783).
    """
    return grpo(inputs, divide_by_std=False)


def grpo_passk(inputs: EstimatorInputs, *, divide_by_std: bool = True) -> Estimate:
    """Return for a group's best row what it is better than the second best by, and 0 for the others.

    Args:
        divide_by_std: In units of the group's unbiased deviation.

    Source: arXiv:2503.19595.
    """
    groups, rewards = _groups(inputs), inputs.row_rewards()
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
    """Return rewards less the mean of the group's other rows.

    Source: arXiv:2402.14740.
    """
    groups = _groups(inputs)
    factor = groups.size.double() / (groups.size - 1).clamp(min=1)
    return Estimate(inputs.per_token(groups.centred(inputs.row_rewards()) * groups.spread(factor)))


def opo(inputs: EstimatorInputs) -> Estimate:
    """Return rewards less the group's mean weighted by length, which has the least variance on policy.

    Source: arXiv:2505.23585.
    """
    return Estimate(inputs.per_token(_groups(inputs).centred(inputs.row_rewards(), inputs.lengths())))


def gpg(inputs: EstimatorInputs, *, f_norm: float = 1.0) -> Estimate:
    """Return centred rewards, raised by the share of rows that earned nothing.

    The factor is rows / rows with a reward other than 0, as verl has it; the paper leaves out the rows of groups
    that are all right as well.

    Args:
        f_norm: Divides all advantages.

    Source: arXiv:2504.02546.
    """
    rewards = inputs.row_rewards()
    factor = len(rewards) / rewards.count_nonzero().clamp(min=1)
    return Estimate(inputs.per_token(_groups(inputs).centred(rewards) * factor / f_norm))


def reinforce_plus_plus_baseline(inputs: EstimatorInputs) -> Estimate:
    """Return centred rewards whitened over the tokens of the batch; a group that says nothing stays at 0.

    Source: REINFORCE++ (arXiv:2501.03262).
    """
    groups, rewards = _groups(inputs), inputs.row_rewards()
    whitened = whiten(inputs.per_token(groups.centred(rewards)))
    return Estimate(whitened * inputs.per_token(groups.spread(groups.varies(rewards))))


def _groups(inputs: EstimatorInputs) -> Grouping:
    return Grouping.by_id(inputs.group_ids, inputs.rows.device)
