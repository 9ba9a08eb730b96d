"""Supervised fine-tuning: the negative log-prob of each trained token, averaged over the whole update."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from areal_lite.api.supervised_config import SFTTrainerConfig
from areal_lite.api.trajectory import TokenSequence
from areal_lite.trainer.microbatches import num_inputs, shared_prefix
from areal_lite.trainer.objectives.aggregation import AggregationMode, LossTerms, token_weights
from areal_lite.trainer.packed_model import PackedSequences
from areal_lite.trainer.step_tokens import Microbatch
from areal_lite.trainer.supervised_trainer import Item, SupervisedStep, SupervisedTrainer, masked_sequence

WORTH_SHARING = 0.25
"""Compute a batch's common prefix (such as a system prompt) once if it has at least this share of the mean length;
for a shorter one the mask costs more than it saves."""


class SFTTrainer(SupervisedTrainer[SFTTrainerConfig]):
    """Trains on items of an ``SFTDataset``; the loss is in nats, per token or per sequence."""

    def _sequences(self, items: Sequence[Item]) -> list[TokenSequence]:
        sequences = [masked_sequence(item["input_ids"], item["loss_mask"], group=0) for item in items]
        mean_length = sum(map(num_inputs, sequences)) / len(sequences)
        if shared_prefix(sequences) >= WORTH_SHARING * mean_length:
            return sequences
        return [dataclasses.replace(one, group_id=str(number)) for number, one in enumerate(sequences)]

    def _weights(self, of_token: Tensor) -> Tensor:
        by_token = self.config.averaging == "token"
        mode = AggregationMode.TOKEN_MEAN if by_token else AggregationMode.SEQ_MEAN_TOKEN_MEAN
        return token_weights(mode, of_token)

    def _scores(self, packed: PackedSequences) -> Tensor:
        logprobs: Tensor = self.scorer(packed).logprobs
        return logprobs

    def _terms(
        self, scores: Tensor, step: SupervisedStep, microbatch: Microbatch
    ) -> tuple[LossTerms, Tensor]:
        return LossTerms(-scores, {}), step.weights[microbatch.tokens]
