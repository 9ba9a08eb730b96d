"""Language models with a scalar head: critics and reward models.

A critic gives the value before each trained token. A reward model is read at the last token of a whole sequence:
:func:`ending` appends one trained token, so blocks, micro-batches and shared prompts work as for any other model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from areal_lite.api.trajectory import TokenSequence
from areal_lite.errors import ConfigError
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.policy_model import load_scalar_model, prepare
from areal_lite.trainer.forward.packed_model import PackedModel, PackedSequences
from areal_lite.trainer.rl.step_tokens import StepCut


def load_critic(model_path: str, *, device: torch.device, gradient_checkpointing: bool = False) -> Any:
    """Return a float32 critic without dropout from a causal LM, critic or reward model; a missing head is zero."""
    model, _ = load_scalar_model(AutoModelForTokenClassification, model_path, what="critic", by_shard=True)
    return prepare(model, device=device, gradient_checkpointing=gradient_checkpointing)


class ValueScorer(PackedModel):
    """A model with a scalar head as a function from packed sequences to values."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        heads = [head for head in model.children() if isinstance(head, nn.Linear) and head.out_features == 1]
        if len(heads) != 1:
            raise ConfigError(
                f"{type(model).__name__} has {len(heads)} linear heads with one output, and a critic needs exactly "
                "one: use another kind of model"
            )
        self._head = (heads[0],)  # a tuple, or the head would be registered twice

    def score(self, packed: PackedSequences) -> Tensor:
        """Return ``[N]`` float32, the value at the position before each trained token."""
        packed, whole = self.own_part(packed)
        states = self.states(packed)
        with torch.autocast(states.device.type, enabled=False):  # bfloat16 has only three digits
            values: Tensor = self._head[0](states.float())
        return whole(values[:, 0].clone())  # FSDP cannot guard a view


def load_reward_model(
    model_path: str, *, device: torch.device, gradient_checkpointing: bool = False, new_head: bool = False
) -> Any:
    """Return a float32 reward model without dropout. ``new_head`` takes a causal LM, whose head starts at 0."""
    model, trained = load_scalar_model(
        AutoModelForSequenceClassification, model_path, what="reward model", by_shard=new_head
    )
    if not trained and not new_head:
        raise ConfigError(
            f"the reward model {model_path!r} has no reward head, so all its rewards would be equal: give the folder "
            "of a trained one"
        )
    return prepare(model, device=device, gradient_checkpointing=gradient_checkpointing)


def ending(sequence: TokenSequence) -> TokenSequence:
    """Return ``sequence`` with one more token, the only trained one; its id is arbitrary."""
    ids = np.append(sequence.input_ids, 0)
    mask = np.arange(len(ids)) == len(sequence)
    gone: dict[str, Any] = dict.fromkeys(("logprobs", "versions", "token_rewards", "reference_logprobs"))
    return dataclasses.replace(sequence, input_ids=ids, loss_mask=mask, **gone)


@torch.no_grad()
def rewards_of(scorer: ValueScorer, sequences: Sequence[TokenSequence], *, max_tokens: int) -> Tensor:
    """Return a reward model's float32 reward of each sequence; those of one group compute shared prefixes once.
    Transformers itself reads the last token that is not padding, another one where a sequence ends with that token."""
    device: torch.device = scorer.model.device
    cut = StepCut([ending(sequence) for sequence in sequences], scorer, ranks=Ranks(), device=device)
    rewards = torch.zeros(len(sequences), device=device)
    for microbatch in cut(range(len(sequences)), max_tokens):
        rewards[microbatch.tokens] = scorer(microbatch.packed)
    return rewards
