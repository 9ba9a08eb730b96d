"""Losses of pairs: DPO on a policy, Bradley-Terry on a reward model. One entry per pair, ``[P]``."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from areal_lite.trainer.objectives.aggregation import LossTerms


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> LossTerms:
    """Return the DPO loss of each pair, given the log-probs ``[P]`` of whole answers under policy and frozen reference.
    The implicit reward is ``beta * (policy - reference)``; ``label_smoothing`` is the share of pairs assumed to be
    mislabelled, 0 to 0.5. Source: DPO (arXiv:2305.18290); label smoothing makes it conservative DPO."""
    chosen = beta * (policy_chosen - reference_chosen)
    rejected = beta * (policy_rejected - reference_rejected)
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return LossTerms(losses, _pair_statistics(chosen, rejected))


def reward_model_loss(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0) -> LossTerms:
    """Return ``-log sigmoid(chosen - rejected - margin)`` of each pair of scores ``[P]``. Source: Bradley-Terry, as in
    InstructGPT (arXiv:2203.02155); margin: Llama 2 (arXiv:2307.09288)."""
    return LossTerms(-logsigmoid(chosen - rejected - margin), _pair_statistics(chosen, rejected))


def _pair_statistics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
