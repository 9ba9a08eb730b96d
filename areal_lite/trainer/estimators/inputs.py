"""The inputs and outputs of advantage estimators, as flat tensors, and figures of their groups.

A step has ``E`` episodes and ``T`` trained tokens: those the policy sampled, episode by episode. The tokens of an
episode are adjacent, however many sequences it was cut into. Prompt and tool tokens are not among them, so no
estimator can discount over them or learn from them. An episode may have no trained token.

Sums are float64 and variances take two passes, so that 10000.1 and 10000.2 keep their difference. The mean of equal
values is that value to the last bit, so a group of one or of equal values deviates by exactly 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self
import torch
from torch import Tensor
from areal_lite.errors import ConfigError

Level = Literal["none", "group", "batch"]
VARIANCE_FLOOR = 1e-8  # added to a variance before taking its root, as in verl


@dataclass(frozen=True, slots=True)
class Grouping:
    """The group of each of ``K`` values, among ``G`` groups."""

    group: Tensor  # ``[K]`` int64
    size: Tensor  # ``[G]`` int64, number of values in each group

    @classmethod
    def numbered(cls, group: Tensor) -> Self:
        """Make a grouping from group numbers ``[K]`` int64, 0 or more."""
        return cls(group, torch.bincount(group))

    @classmethod
    def by_id(cls, group_ids: Sequence[str], device: torch.device) -> Self:
        """Make a grouping from ids, numbered in the order of their first appearance."""
        numbers: dict[str, int] = {}
        group = [numbers.setdefault(name, len(numbers)) for name in group_ids]
        return cls.numbered(torch.tensor(group, dtype=torch.int64, device=device))

    def sums(self, values: Tensor) -> Tensor:
        """Return ``[G]`` float64, the sum of each group's values."""
        sums = torch.zeros(len(self.size), dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self.group, values.double())

    def means(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return ``[G]`` float64, the mean of each group's values, weighted by ``weights [K]`` (0 or more)."""
        total = self.sums(values if weights is None else values * weights)
        means = total / (self.size if weights is None else self.sums(weights))
        low, high = self.ranges(values)
        return torch.where(low == high, low, means)

    def ranges(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[G]`` and ``[G]``, the smallest and the largest value of each group; 0 in an empty one."""
        empty = torch.zeros(len(self.size), dtype=values.dtype, device=values.device)
        low = empty.scatter_reduce(0, self.group, values, "amin", include_self=False)
        return low, empty.scatter_reduce(0, self.group, values, "amax", include_self=False)

    def varies(self, values: Tensor) -> Tensor:
        """Return ``[G]`` bool, False where all values of a group are equal."""
        low, high = self.ranges(values)
        return low != high

    def centred(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return ``[K]`` float64, values minus their group's mean; ``weights`` as in :meth:`means`."""
        return values - self.spread(self.means(values, weights))

    def deviations(self, centred: Tensor) -> Tensor:
        """Return ``[G]`` float64, the unbiased standard deviation of each group; 0 in a group of one."""
        return (self.sums(centred.square()) / (self.size - 1).clamp(min=1)).sqrt()

    def spread(self, group_values: Tensor) -> Tensor:
        """Return ``[K]``, the entry of ``group_values [G]`` for each value's group."""
        return group_values.index_select(0, self.group)


def normalize_advantages(
    advantages: Tensor, episodes: Tensor, group_ids: Sequence[str], *, mean: Level = "none", std: Level = "none"
) -> Tensor:
    """Return advantages ``[T]`` minus a mean and divided by an unbiased deviation around its own mean, each over the
    tokens of nothing, the token's group, or the batch. ``episodes [T]`` int64, ``group_ids [E]``."""
    by_group = Grouping.by_id(group_ids, episodes.device).group.index_select(0, episodes)
    groupings = {"batch": Grouping.numbered(torch.zeros_like(episodes)), "group": Grouping.numbered(by_group)}
    result = advantages.double() if mean == "none" else groupings[mean].centred(advantages)
    if std != "none":
        grouping = groupings[std]
        variances = grouping.deviations(grouping.centred(advantages)).square()
        result = result * grouping.spread(torch.where(variances > 0, (variances + VARIANCE_FLOOR).rsqrt(), 1.0))
    return result.to(advantages.dtype)


def whiten(values: Tensor) -> Tensor:
    """Return ``[T]`` values scaled to mean 0 and deviation 1 over the batch; exactly 0 if all are equal."""
    one_group = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    return normalize_advantages(values, one_group, [""], mean="batch", std="batch")


_HINTS = {
    "values": "the value of each token: configure trainer.critic, or choose an advantage without one, such as grpo",
    "baselines": "the reward of a greedy answer to each prompt: have one generated (trainer.advantage: remax does), "
    "or choose rloo, which needs none",
    "proximal_logprobs": "proximal log-probs: have the trainer compute them (trainer.proximal: trainer)",
    "sum_squared_probs": "sums of squared probabilities: have the trainer compute them (trainer.proximal: trainer)",
    "importance_weights": "weights of proximal / behaviour: have the trainer compute them (trainer.proximal: trainer)",
    "turns": "the rewards of turns: train on episodes that have them, or choose grpo, which compares whole episodes",
}
PROXIMAL_INPUTS = ("proximal_logprobs", "sum_squared_probs", "importance_weights")  # from a pass before the update


class MissingInput(ConfigError):
    """An estimator needs the input ``name``, and it was not computed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"trainer.advantage: the estimator needs {_HINTS[name]}")
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The ``S`` rewarded turns of a step: model calls with a reward of their own. An episode that is rewarded as a
    whole has one such turn. Turns form a tree, because an agent may continue a conversation in several ways."""

    of_token: Tensor
    """``[T]`` int64, the turn that each token is credited to; non-decreasing."""
    rewards: Tensor
    """``[S]`` float, reward of each turn."""
    episodes: Tensor
    """``[S]`` int64, episode of each turn."""
    index: Tensor
    """``[S]`` int64, how many model calls came before the turn on its path, from 0."""
    parents: Tensor
    """``[S]`` int64, the rewarded turn that the turn's path extends; -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorInputs:
    """One step's rewards, and inputs computed before its advantages, which are None unless :meth:`needed`."""

    scores: Tensor
    """``[E]`` float, reward of each episode."""
    group_ids: Sequence[str]
    """``[E]`` group of each episode, in any order."""
    episodes: Tensor
    """``[T]`` int64, episode of each token; non-decreasing."""
    token_rewards: Tensor
    """``[T]`` float, reward of each token: its own, or the score on its episode's last token; minus any KL penalty."""
    values: Tensor | None = None
    """``[T]`` float, the critic's estimates."""
    baselines: Tensor | None = None
    """``[E]`` float, reward of the greedy answer (ReMax)."""
    proximal_logprobs: Tensor | None = None
    """``[T]`` float, nats."""
    sum_squared_probs: Tensor | None = None
    """``[T]`` float, sum over the vocabulary of the squared probabilities where the token was sampled."""
    importance_weights: Tensor | None = None
    """``[T]`` float, proximal / behaviour."""
    turns: Turns | None = None
    """Rewards per turn."""

    def needed(self, name: str) -> Any:
        """Return the field ``name``; the trainer computes the inputs that the estimator requests in a dry run."""
        if (value := getattr(self, name)) is None:
            raise MissingInput(name)
        return value

    def groups(self) -> Grouping:
        return Grouping.by_id(self.group_ids, self.episodes.device)

    def lengths(self) -> Tensor:
        """Return ``[E]`` int64, the trained tokens of each episode."""
        return torch.bincount(self.episodes, minlength=len(self.group_ids))

    def episode_rewards(self) -> Tensor:
        """Return ``[E]`` float64, the sum of each episode's token rewards; its score if it has no token."""
        sums = torch.zeros_like(self.scores, dtype=torch.float64)
        sums.index_add_(0, self.episodes, self.token_rewards.double())
        return torch.where(self.lengths() > 0, sums, self.scores.double())

    def turn_rewards(self) -> Tensor:
        """Return ``[S]`` float64, the reward of each turn minus the KL penalty of its tokens."""
        turns: Turns = self.needed("turns")
        lengths = self.lengths()
        last = (lengths.cumsum(0) - 1)[lengths > 0]
        penalties = self.token_rewards.double().index_add(0, last, -self.scores[lengths > 0].double())
        return turns.rewards.double().index_add(0, turns.of_token, penalties)

    def per_token(self, episode_values: Tensor) -> Tensor:
        """Return ``[T]``, the entry of ``episode_values [E]`` for each token's episode, in the rewards' dtype."""
        return episode_values.to(self.token_rewards.dtype).index_select(0, self.episodes)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The advantages, and the targets of a critic."""

    advantages: Tensor
    """``[T]`` float."""
    returns: Tensor | None = None
    """``[T]`` float; None where the estimator does not compute them."""


Estimator = Callable[..., Estimate]
"""A pure function of a step; its keyword-only arguments are the options of ``trainer.advantage_kwargs``."""
