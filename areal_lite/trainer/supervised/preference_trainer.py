"""Training on pairs of a better and a worse answer: a policy by DPO, or a reward model.

Both answers of a pair are computed in one micro-batch, because the loss compares them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.supervised_config import DPOTrainerConfig, RewardModelTrainerConfig
from areal_lite.models.lora import adapters_off
from areal_lite.models.parallel.shard_loading import is_empty
from areal_lite.models.parallel.sharding import shard
from areal_lite.models.policy_model import resolve_device
from areal_lite.trainer.forward.packed_model import PackedModel, PackedSequences
from areal_lite.trainer.forward.scalar_model import ValueScorer, ending, load_reward_model
from areal_lite.trainer.objectives.aggregation import LossTerms
from areal_lite.trainer.rl.step_tokens import Microbatch
from areal_lite.trainer.supervised.supervised_trainer import C, Item, SupervisedStep, SupervisedTrainer, masked_sequence


class PreferenceTrainer(SupervisedTrainer[C]):
    """Trains on items of a ``PreferenceDataset``; each pair counts the same."""

    statistics = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    together = True

    def _sequences(self, items: Sequence[Item]) -> list[TokenSequence]:
        return [
            masked_sequence(item[f"{name}_ids"], item[f"{name}_mask"], number)
            for number, item in enumerate(items)
            for name in ("chosen", "rejected")
        ]

    def _weights(self, of_token: Tensor) -> Tensor:
        pairs = len(torch.unique(of_token)) // 2
        return of_token.new_full((pairs,), 1 / pairs, dtype=torch.float64)


class DPOTrainer(PreferenceTrainer[DPOTrainerConfig]):
    """Direct preference optimisation (arXiv:2305.18290) against the frozen starting model: a copy, or under adapters
    the model without them."""

    def _load(self, model_path: str) -> PackedModel:
        scorer = super()._load(model_path)
        self._reference: PackedModel | None = None
        if self.config.lora is None:
            reference = super()._load(model_path) if is_empty(scorer.model) else copy.deepcopy(scorer)
            self._reference = shard(reference.requires_grad_(False))
        return scorer

    def _scores(self, packed: PackedSequences) -> Tensor:
        # Every rank runs both models, also on micro-batches that do not count; the loss needs only the difference.
        reference = self._reference_logprobs(packed)
        logprobs: Tensor = self.scorer(packed).logprobs
        return logprobs - reference

    def _terms(self, scores: Tensor, step: SupervisedStep, microbatch: Microbatch) -> tuple[LossTerms, Tensor]:
        pairs = _pair_sums(scores, step.of_token[microbatch.tokens])
        terms = dpo_loss(*pairs, beta=self.config.beta, label_smoothing=self.config.label_smoothing)
        return terms, step.weights[: len(terms.losses)]

    @torch.no_grad()
    def _reference_logprobs(self, packed: PackedSequences) -> Tensor:
        if self._reference is not None:
            logprobs: Tensor = self._reference(packed).logprobs
        else:
            with adapters_off(self.model):
                logprobs = self.scorer(packed).logprobs
        return logprobs


class RewardModelTrainer(PreferenceTrainer[RewardModelTrainerConfig]):
    """Trains a reward model so that the chosen answer's reward is above the rejected one's (Bradley-Terry).
    ``model_path`` is a causal LM, which gets a head with one output, or a reward model."""

    def _load(self, model_path: str) -> PackedModel:
        model = load_reward_model(
            model_path,
            device=resolve_device(self.config.device),
            gradient_checkpointing=self.config.gradient_checkpointing,
            new_head=True,
        )
        return ValueScorer(model)

    def _sequences(self, items: Sequence[Item]) -> list[TokenSequence]:
        return [ending(sequence) for sequence in super()._sequences(items)]

    def _scores(self, packed: PackedSequences) -> Tensor:
        rewards: Tensor = self.scorer(packed)
        return rewards

    def _terms(self, scores: Tensor, step: SupervisedStep, microbatch: Microbatch) -> tuple[LossTerms, Tensor]:
        terms = reward_model_loss(*_pair_sums(scores, step.of_token[microbatch.tokens]))
        return terms, step.weights[: len(terms.losses)]


def _pair_sums(values: Tensor, of_token: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[P]`` the sum over chosen, and over rejected, sequences of the pairs in a micro-batch."""
    sequences, index = torch.unique(of_token, return_inverse=True)
    sums = values.new_zeros(len(sequences)).index_add(0, index, values).view(-1, 2)
    return sums[:, 0], sums[:, 1]


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> LossTerms:
    """Return the DPO loss of each pair, given the log-probs ``[P]`` of whole answers under the policy minus those under
    the frozen reference. ``beta`` times this is the implicit reward; ``label_smoothing`` is the share of pairs assumed
    to be mislabelled, 0 to 0.5. Source: DPO (arXiv:2305.18290); label smoothing makes it conservative DPO."""
    chosen, rejected = beta * chosen, beta * rejected
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return LossTerms(losses, _pair_statistics(chosen, rejected))


def reward_model_loss(chosen: Tensor, rejected: Tensor) -> LossTerms:
    """Return ``-log sigmoid(chosen - rejected)`` of each pair of scores ``[P]``: Bradley-Terry (arXiv:2203.02155)."""
    return LossTerms(-logsigmoid(chosen - rejected), _pair_statistics(chosen, rejected))


def _pair_statistics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
