"""Estimators of a token's advantage, from the rewards that follow it in its episode or from those of its group.

Sums of the rewards that follow run over trained tokens: tool tokens between two turns neither end a sum nor count in
its discount. An episode of several sequences is discounted along all of its tokens, sequence after sequence.

Estimators of a group compare its episodes, or each turn with those at its index in the other episodes. An episode's
reward is the sum of its token rewards; all its tokens, or all credited to a turn, get the same advantage. A group of
one and a group of equal rewards do not say which answer was better: their advantages are exactly 0. So are those of
turns at an index that fewer than two episodes of the group reach. The baseline of an index counts every episode once,
however many turns of that index its tree has.
"""

import torch
from torch import Tensor
from torch.nn.functional import hardshrink
from areal_lite.config.schema import Above0, Share
from areal_lite.trainer.estimators.inputs import Estimate, Estimator, EstimatorInputs, Grouping, whiten

ENERGY_FLOOR = 1e-8  # added to the sum of weights at a position, as in verl
STD_FLOOR = 1e-6  # added to a group's standard deviation, as in verl


def discounted_sums(values: Tensor, episodes: Tensor, discount: float) -> Tensor:
    """Return each token's value ``[T]`` plus the discounted values after it in its episode. Each pass doubles the reach
    of a sum, so an episode of ``L`` tokens takes ``log2(L)`` passes, and rounding errors grow with that many additions.
    Values ``[1, 1, 1, 5]`` of episodes ``[0, 0, 0, 1]`` with a discount of 0.5 give ``[1.75, 1.5, 1, 5]``."""
    sums = values.clone()
    longest = int(torch.bincount(episodes).max()) if len(episodes) else 0
    reach = 1
    while reach < longest:
        # where, not a product: a NaN or inf must stay in its episode.
        sums[:-reach].add_(torch.where(episodes[reach:] == episodes[:-reach], sums[reach:], 0.0), alpha=discount**reach)
        reach *= 2
    return sums


def gae(inputs: EstimatorInputs, *, gamma: Share = 1.0, lam: Share = 1.0) -> Estimate:
    """Return generalized advantages, whitened over the batch; returns are values plus unwhitened advantages. ``gamma``
    discounts per token; ``lam`` 0 trusts the critic after one token, 1 the rewards to the end. The order of a fork's
    branches counts: each continues with the value and rewards of the next. Source: arXiv:1506.02438."""
    values, episodes = inputs.needed("values"), inputs.episodes
    following = torch.zeros_like(values)  # the value of the next token of the same episode; 0 at its end
    following[:-1] = torch.where(episodes[1:] == episodes[:-1], values[1:], 0.0)
    advantages = discounted_sums(inputs.token_rewards + gamma * following - values, inputs.episodes, gamma * lam)
    return Estimate(whiten(advantages), advantages + values)


def reinforce(inputs: EstimatorInputs, *, gamma: Share = 1.0) -> Estimate:
    """Return the returns, discounted by ``gamma`` per token. Source: Williams (1992)."""
    returns = discounted_sums(inputs.token_rewards, inputs.episodes, gamma)
    return Estimate(returns, returns)


def reinforce_plus_plus(inputs: EstimatorInputs, *, gamma: Share = 1.0) -> Estimate:
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
    advantage is exactly 0; ``credit_lone_tail`` uses the longest one's return. Source: arXiv:2602.07078."""
    episodes = inputs.episodes
    returns = discounted_sums(inputs.token_rewards, episodes, 1.0)
    norms = 1 - 2 * inputs.needed("proximal_logprobs").exp() + inputs.needed("sum_squared_probs")
    norms = hardshrink(norms, 1e-6)  # a certain token's norm is 0; rounding may leave it slightly above or below
    if inputs.importance_weights is not None:
        norms = norms * inputs.importance_weights.square()
    energy = discounted_sums(norms.flip(0), episodes.flip(0), 1.0).flip(0)

    groups = inputs.groups()
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


def grpo(inputs: EstimatorInputs, *, divide_by_std: bool = True) -> Estimate:
    """Return rewards minus their group's mean, divided by its unbiased standard deviation if ``divide_by_std``. Rewards
    ``[1, 0, 0, 1]`` of a group give ``[0.866, -0.866, -0.866, 0.866]``. Source: DeepSeekMath (arXiv:2402.03300)."""
    groups = inputs.groups()
    advantages = groups.centred(inputs.episode_rewards())
    if divide_by_std:
        advantages = advantages / (groups.spread(groups.deviations(advantages)) + STD_FLOOR)
    return Estimate(inputs.per_token(advantages))


def dr_grpo(inputs: EstimatorInputs) -> Estimate:
    """Return rewards minus their group's mean. Source: Dr. GRPO (arXiv:2503.20783)."""
    return grpo(inputs, divide_by_std=False)


def grpo_passk(inputs: EstimatorInputs, *, divide_by_std: bool = True) -> Estimate:
    """Return for each group's best episode its reward minus the second best, else 0. Source: arXiv:2503.19595."""
    groups, rewards = inputs.groups(), inputs.episode_rewards()
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
    groups = inputs.groups()
    factor = groups.size.double() / (groups.size - 1).clamp(min=1)
    return Estimate(inputs.per_token(groups.centred(inputs.episode_rewards()) * groups.spread(factor)))


def opo(inputs: EstimatorInputs) -> Estimate:
    """Return rewards minus their length-weighted mean, the baseline of least variance. Source: arXiv:2505.23585."""
    return Estimate(inputs.per_token(inputs.groups().centred(inputs.episode_rewards(), inputs.lengths())))


def gpg(inputs: EstimatorInputs, *, f_norm: Above0 = 1.0) -> Estimate:
    """Return centred rewards times episodes / episodes with a nonzero reward, as in verl, divided by ``f_norm``. The
    paper also leaves out groups whose answers are all right. Source: arXiv:2504.02546."""
    rewards = inputs.episode_rewards()
    factor = len(rewards) / rewards.count_nonzero().clamp(min=1)
    return Estimate(inputs.per_token(inputs.groups().centred(rewards) * factor / f_norm))


def reinforce_plus_plus_baseline(inputs: EstimatorInputs) -> Estimate:
    """Return centred rewards whitened over all tokens; groups of equal rewards stay at 0. Source: arXiv:2501.03262."""
    groups, rewards = inputs.groups(), inputs.episode_rewards()
    whitened = whiten(inputs.per_token(groups.centred(rewards)))
    return Estimate(whitened * inputs.per_token(groups.spread(groups.varies(rewards))))


def turn_grpo(inputs: EstimatorInputs, *, divide_by_std: bool = True) -> Estimate:
    """Return each turn's reward minus the group's baseline at its index, divided by the deviation there. Right where
    later turns earn the same whatever a turn does, or ``apply_reward_discount`` has added their rewards to its own;
    elsewhere the update may point the wrong way, unlike that of :func:`turn_returns`.

    The baseline is the mean, over the group's episodes that reach the index, of each episode's mean reward at it. The
    deviation is the unbiased one around that baseline, with the mean square of an episode's turns for each episode.
    Turn rewards ``[1, 0]``, ``[0, 1]`` and ``[0]`` of three episodes give ``[1.155, -0.707]``, ``[-0.577, 0.707]`` and
    ``[-0.577]``. If the second turn of the first episode was sampled twice, with rewards 0 and 1, the baseline of index
    1 is 3/4, the mean of 1/2 and 1. Source: MT-GRPO (arXiv:2505.11821), less its outcome term; the trees are ours."""
    return _compare(inputs, inputs.turn_rewards(), divide_by_std=divide_by_std)


def turn_returns(inputs: EstimatorInputs, *, gamma: Share = 1.0, divide_by_std: bool = True) -> Estimate:
    """Return each turn's discounted return minus the group's baseline at its index, as :func:`turn_grpo` does. The
    return of a turn is its reward plus ``gamma`` times the mean return of its children: a turn that was continued in
    several ways was still one decision. Source: GTPO (arXiv:2511.14846); the mean over continuations is ours."""
    turns, returns = inputs.needed("turns"), inputs.turn_rewards()
    has_parent = turns.parents >= 0
    num_children = torch.bincount(turns.parents[has_parent], minlength=len(returns)).clamp(min=1)
    for index in torch.unique(turns.index).flip(0).tolist():  # children have a larger index than their parent
        children = (has_parent & (turns.index == index)).nonzero()[:, 0]
        parents = turns.parents[children]
        returns.index_add_(0, parents, gamma * returns[children] / num_children[parents])
    return _compare(inputs, returns, divide_by_std=divide_by_std)


def _compare(inputs: EstimatorInputs, values: Tensor, *, divide_by_std: bool) -> Estimate:
    turns = inputs.needed("turns")
    width = int(turns.index.max()) + 1 if len(values) else 1
    visits, visit = torch.unique(turns.episodes * width + turns.index, return_inverse=True)
    by_visit = Grouping.numbered(visit)  # the turns of one episode at one index, which count as one
    group = inputs.groups().group[visits // width]
    places = Grouping.numbered(group * width + visits % width)  # the visits of one group at one index

    baselines = places.spread(places.means(by_visit.means(values)))
    advantages = torch.where(by_visit.spread(places.spread(places.size) > 1), values - by_visit.spread(baselines), 0.0)
    if divide_by_std:
        variances = places.sums(by_visit.means(advantages.square())) / (places.size - 1).clamp(min=1)
        advantages = advantages / (by_visit.spread(places.spread(variances.sqrt())) + STD_FLOOR)
    return Estimate(advantages.to(inputs.token_rewards.dtype).index_select(0, turns.of_token))


_COMPARING: tuple[Estimator, ...] = (
    grpo, dr_grpo, grpo_passk, rloo, reinforce_plus_plus_baseline, opo, gpg, turn_grpo, turn_returns,
    optimal_token_baseline,
)  # fmt: skip
COMPARES_GROUP = frozenset(estimator.__name__ for estimator in _COMPARING)  # learn nothing from a group of one
ESTIMATORS: dict[str, Estimator] = {
    estimator.__name__: estimator for estimator in (*_COMPARING, gae, reinforce, reinforce_plus_plus, remax)
}
