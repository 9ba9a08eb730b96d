"""Training on pairs of a better and a worse answer: a policy by DPO, or a reward model.

Both answers of a pair are computed in one micro-batch, because the loss compares them.
"""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.supervised_config import DPOTrainerConfig, RewardModelTrainerConfig
from areal_lite.models.lora import adapters_off
from areal_lite.models.parallel.sharding import is_empty, shard
from areal_lite.trainer.forward.microbatches import num_inputs
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

    @abstractmethod
    def _pair_losses(self, chosen: Tensor, rejected: Tensor) -> LossTerms:
        """Return the loss of each pair from the sums ``[P]`` of the scores of either answer."""

    def _terms(self, scores: Tensor, step: SupervisedStep, microbatch: Microbatch) -> tuple[LossTerms, Tensor]:
        sequences, index = torch.unique(step.of_token[microbatch.tokens], return_inverse=True)
        sums = scores.new_zeros(len(sequences)).index_add(0, index, scores).view(-1, 2)
        return self._pair_losses(sums[:, 0], sums[:, 1]), step.weights[: len(sums)]


class DPOTrainer(PreferenceTrainer[DPOTrainerConfig]):
    """DPO (arXiv:2305.18290) against the frozen starting model: a copy, or the model without its adapters."""

    def _load(self, model_path: str) -> PackedModel:
        scorer = self._reference = super()._load(model_path)
        if self.config.lora is None:
            reference = super()._load(model_path) if is_empty(scorer.model) else copy.deepcopy(scorer)
            self._reference = shard(reference.requires_grad_(False))
        return scorer

    def _scores(self, packed: PackedSequences) -> Tensor:
        # Every rank runs both models, also on micro-batches that do not count; the loss needs only the difference.
        with torch.no_grad(), adapters_off(self.model) if self.config.lora else nullcontext():
            reference: Tensor = self._reference(packed).logprobs
        return super()._scores(packed) - reference

    def _pair_losses(self, chosen: Tensor, rejected: Tensor) -> LossTerms:
        return dpo_loss(chosen, rejected, beta=self.config.beta, label_smoothing=self.config.label_smoothing)


class RewardModelTrainer(PreferenceTrainer[RewardModelTrainerConfig]):
    """Trains a reward model, or a causal LM with a new head of one output, on pairs of answers (Bradley-Terry)."""

    def _load(self, model_path: str) -> PackedModel:
        model = load_reward_model(
            model_path, device=self.device, gradient_checkpointing=self.config.gradient_checkpointing, new_head=True
        )
        return ValueScorer(model)

    def _sequences(self, items: Sequence[Item]) -> list[TokenSequence]:
        ends = [(one, num_inputs(one) + 1) for one in super()._sequences(items)]  # at the end mark, as a run's
        return [ending(replace(one, input_ids=one.input_ids[:end], loss_mask=one.loss_mask[:end])) for one, end in ends]

    def _scores(self, packed: PackedSequences) -> Tensor:
        rewards: Tensor = self.scorer(packed)
        return rewards

    def _pair_losses(self, chosen: Tensor, rejected: Tensor) -> LossTerms:
        """Return ``-log sigmoid(chosen - rejected)`` of each pair of scores: Bradley-Terry (arXiv:2203.02155)."""
        return LossTerms(-logsigmoid(chosen - rejected), _pair_statistics(chosen, rejected))


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> LossTerms:
    """Return the DPO loss of each pair, given the log-probs ``[P]`` of whole answers under the policy minus those under
    the frozen reference. ``beta`` times this is the implicit reward; ``label_smoothing`` is the share of pairs assumed
    to be mislabelled, 0 to 0.5. Source: DPO (arXiv:2305.18290); label smoothing makes it conservative DPO."""
    chosen, rejected = beta * chosen, beta * rejected
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return LossTerms(losses, _pair_statistics(chosen, rejected))


def _pair_statistics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
