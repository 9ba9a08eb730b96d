"""What an advantage estimator is given and returns, as flat tensors.

A step has ``N`` rows (sequences) and ``T`` trained tokens: those the policy sampled, row by row. Prompt and tool
tokens are not among them, so no estimator can discount over one or learn from it. A row may have no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from areal_lite.errors import ConfigError

_MENDS = {
    "values": "the value of each token: configure trainer.critic, or an advantage without one such as grpo",
    "baselines": "the reward of a greedy answer for each row: have one generated (trainer.advantage: remax does), or "
    "choose rloo, which needs none",
    "proximal_logprobs": "proximal log-probs: have the trainer compute them (trainer.proximal: trainer)",
    "sum_squared_probs": "sums of squared probabilities: have the trainer compute them (trainer.proximal: trainer)",
    "importance_weights": "weights of proximal / behaviour: have the trainer compute them (trainer.proximal: trainer)",
}
OF_PROXIMAL_POLICY = ("proximal_logprobs", "sum_squared_probs", "importance_weights")
"""What a pass of the trainer before the update gives."""


class MissingInput(ConfigError):
    """An estimator needs the input ``name``, and it was not computed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"trainer.advantage: the estimator needs {_MENDS[name]}")
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorInputs:
    """One step's rewards, and what else was computed before its advantages.

    Raises:
        ValueError: If a shape differs, the rows are not in order, or a number is not finite.
    """

    scores: Tensor
    """``[N]`` float, reward of each row."""

    group_ids: Sequence[str]
    """``[N]`` group of each row, in any order."""

    rows: Tensor
    """``[T]`` int64, row of each token; never falls."""

    token_rewards: Tensor
    """``[T]`` float, what each token earned: the score on its row's last token, less a KL penalty where there is
    one. Its dtype is that of the advantages."""

    # What follows is None where the estimator did not ask for it through needed().

    values: Tensor | None = None
    """``[T]`` float, the critic's estimates."""

    baselines: Tensor | None = None
    """``[N]`` float, reward of the greedy answer (ReMax)."""

    proximal_logprobs: Tensor | None = None
    """``[T]`` float, nats."""

    sum_squared_probs: Tensor | None = None
    """``[T]`` float, sum over the vocabulary of the squared probabilities where the token was sampled."""

    importance_weights: Tensor | None = None
    """``[T]`` float, proximal / behaviour."""

    def __post_init__(self) -> None:
        rows, num_rows, num_tokens = self.rows, len(self.group_ids), len(self.rows)
        if num_tokens and not (rows[0] >= 0 and rows[-1] < num_rows and bool((rows[1:] >= rows[:-1]).all())):
            raise ValueError(
                f"rows go from {int(rows[0])} to {int(rows[-1])}: they must never fall, from 0 or more to less than "
                f"{num_rows}, the number of group ids; sort the tokens by row"
            )
        for name in ("scores", "baselines"):
            self._check(name, num_rows, per="row")
        for name in ("token_rewards", "values", *OF_PROXIMAL_POLICY):
            self._check(name, num_tokens, per="token")

    def _check(self, name: str, count: int, *, per: str) -> None:
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            return
        if tensor.shape != (count,):
            raise ValueError(f"{name} is {list(tensor.shape)}: give [{count}], one for each {per}")
        finite = torch.isfinite(tensor)
        if not finite.all():
            place = int((~finite).nonzero()[0])
            row = place if per == "row" else int(self.rows[place])
            raise ValueError(
                f"{name} holds {tensor[place].item()} in row {row}: every number must be finite; let an episode "
                "without a reward fail, and resume a model that diverged from an earlier checkpoint"
            )

    def needed(self, name: str) -> Tensor:
        """Return the field ``name``. The trainer computes what an estimator asked for when its config was checked.

        Raises:
            MissingInput: If it is None; the text says what to configure.
        """
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise MissingInput(name)
        return tensor

    def lengths(self) -> Tensor:
        """Return ``[N]`` int64, the tokens of each row."""
        return torch.bincount(self.rows, minlength=len(self.group_ids))

    def row_rewards(self) -> Tensor:
        """Return ``[N]`` float64, what each row's tokens earned together; the score of a row without tokens."""
        sums = torch.zeros_like(self.scores, dtype=torch.float64)
        sums.index_add_(0, self.rows, self.token_rewards.double())
        return torch.where(self.lengths() > 0, sums, self.scores.double())

    def per_token(self, row_values: Tensor) -> Tensor:
        """Return ``[T]`` the value of each token's row, in the rewards' dtype; ``row_values`` is ``[N]``."""
        return row_values.to(self.token_rewards.dtype).index_select(0, self.rows)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages, and what a critic would learn from the same rewards."""

    advantages: Tensor
    """``[T]`` float."""

    returns: Tensor | None = None
    """``[T]`` float; None where the estimator knows rows only."""


class Estimator(Protocol):
    """A pure function of a step; its keyword-only arguments are the options of ``trainer.advantage_kwargs``."""

    def __call__(self, inputs: EstimatorInputs, /) -> Estimate: ...
