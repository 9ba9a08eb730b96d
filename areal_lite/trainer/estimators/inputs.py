"""The inputs and outputs of advantage estimators, as flat tensors.

A step has ``E`` episodes and ``T`` trained tokens: those the policy sampled, episode by episode. The tokens of an
episode are adjacent, however many sequences it was cut into. Prompt and tool tokens are not among them, so no
estimator can discount over them or learn from them. An episode may have no trained token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_lite.errors import ConfigError
from areal_lite.trainer.estimators.grouping import Grouping

_HINTS = {
    "values": "the value of each token: configure trainer.critic, or choose an advantage without one, such as grpo",
    "baselines": "the reward of a greedy answer to each prompt: have one generated (trainer.advantage: remax does), "
    "or choose rloo, which needs none",
    "proximal_logprobs": "proximal log-probs: have the trainer compute them (trainer.proximal: trainer)",
    "sum_squared_probs": "sums of squared probabilities: have the trainer compute them (trainer.proximal: trainer)",
    "importance_weights": "weights of proximal / behaviour: have the trainer compute them (trainer.proximal: trainer)",
    "turns": "the rewards of turns: train on episodes that have them, or choose grpo, which compares whole episodes",
}
PROXIMAL_INPUTS = ("proximal_logprobs", "sum_squared_probs", "importance_weights")
"""Inputs from a forward pass of the trainer before the update."""


class MissingInput(ConfigError):
    """An estimator needs the input ``name``, and it was not computed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"trainer.advantage: the estimator needs {_HINTS[name]}")
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The ``S`` rewarded turns of a step: model calls with a reward of their own. An episode that is rewarded as a
    whole has one such turn. The turns of an episode form a tree, because an agent may continue a conversation in
    several ways."""

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
    """One step's rewards, and other inputs computed before its advantages."""

    scores: Tensor
    """``[E]`` float, reward of each episode."""
    group_ids: Sequence[str]
    """``[E]`` group of each episode, in any order."""
    episodes: Tensor
    """``[T]`` int64, episode of each token; non-decreasing."""
    token_rewards: Tensor
    """``[T]`` float, reward of each token: its own, or the score on its episode's last token; minus any KL penalty.
    Advantages have its dtype."""

    # The rest is None unless the estimator requests it with needed().

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
