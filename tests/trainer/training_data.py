"""Sequences to train on: built by hand, or drawn from a seed."""

from __future__ import annotations
from collections.abc import Sequence
import numpy as np
import torch
from areal_lite.api.trajectory import TokenSequence
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.training_batch import collate_sequences
from areal_lite.trainer.forward.microbatches import plan_blocks
from areal_lite.trainer.forward.packed_model import PackedSequences, pack
from areal_lite.trainer.objectives.aggregation import LossTerms
from areal_lite.trainer.objectives.policy_loss import PolicyInputs

VOCABULARY = 259


def sequence(
    ids: Sequence[int],
    trained: Sequence[int],
    *,
    reward: float = 1.0,
    group: str = "g",
    behaviour: Sequence[float] | None = None,
    versions: Sequence[int] | None = None,
) -> TokenSequence:
    """Return a sequence that trains the tokens at the places ``trained``."""
    mask = np.zeros(len(ids), dtype=bool)
    mask[list(trained)] = True
    return TokenSequence(
        input_ids=np.array(ids, dtype=np.int64),
        loss_mask=mask,
        logprobs=None if behaviour is None else np.array(behaviour, dtype=np.float32),
        versions=None if versions is None else np.array(versions, dtype=np.int64),
        reward=reward,
        group_id=group,
    )


def training_batch(sequences: Sequence[TokenSequence]) -> DataProto:
    """Return the sequences as a DataProto."""
    length = max(len(one.input_ids) for one in sequences)
    return DataProto.from_single_dict(collate_sequences(sequences, length, pad_token_id=0))


def packed_together(
    batch: Sequence[TokenSequence], *, share: bool = True
) -> tuple[PackedSequences, list[TokenSequence]]:
    """Return the batch in one micro-batch with a block per group, and its sequences in their packed order."""
    bundles = plan_blocks(batch, range(len(batch)), max_tokens=10_000, balance_length=10_000, share=share)
    blocks = [block for bundle in bundles for block in bundle]
    order = [batch[index] for block in blocks for index in block.sequences]
    return pack(batch, blocks, device=torch.device("cpu")), order


def drawn_batch(seed: int, *, groups: int = 3, group_size: int = 4, version: int = 0) -> list[TokenSequence]:
    """Return multi-turn groups: a shared prompt, then answers with untrained tool tokens between.

    Tokens were sampled under the policy versions up to ``version``, 3 at most.
    """
    rng = np.random.default_rng(seed)
    batch = []
    for group in range(groups):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 9)).tolist()
        for _ in range(group_size):
            spans = rng.integers(1, 6, 2 * int(rng.integers(1, 4)) - 1)  # answer, tool, answer, ...
            ids, trained = list(prompt), []
            for number, length in enumerate(spans):
                if number % 2 == 0:
                    trained += range(len(ids), len(ids) + length)
                ids += rng.integers(3, VOCABULARY, length).tolist()
            batch.append(
                sequence(
                    ids,
                    trained,
                    reward=float(rng.normal()),
                    group=f"group-{group}",
                    behaviour=(-rng.exponential(5.0, len(ids))).tolist(),
                    versions=rng.integers(0, 4, len(ids)).clip(max=version).tolist(),
                )
            )
    return batch


def squared_ratio(inputs: PolicyInputs, *, strength: float = 1.0) -> LossTerms:
    """A loss that also trains episodes without an advantage."""
    ratio = (inputs.policy - inputs.proximal).exp()
    return LossTerms(-ratio * inputs.advantages + strength * (ratio - 1) ** 2, {"ratio": ratio.detach()})
