"""A critic: a language model with a scalar head that gives the value before each trained token.

Knows nothing of returns or losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from areal_lite.errors import ConfigError
from areal_lite.trainer.packed_model import PackedModel, PackedSequences
from areal_lite.trainer.policy_model import load_scalar_model, prepare


def load_critic(model_path: str, *, device: torch.device, gradient_checkpointing: bool = False) -> Any:
    """Return a critic in float32 on ``device``, without dropout, from a folder of a causal LM, critic or reward model.

    The scalar head is loaded if the folder has one; otherwise it is zero, and so are all values.

    Raises:
        ConfigError: If the model cannot be loaded, or its architecture has no token classifier.
    """
    model, _ = load_scalar_model(AutoModelForTokenClassification, model_path, what="critic")
    return prepare(model, device=device, gradient_checkpointing=gradient_checkpointing)


class ValueScorer(PackedModel):
    """A model with a scalar head as a function from packed sequences to values.

    Raises:
        ConfigError: If the head is not a single linear layer with one output.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        heads = [head for head in model.children() if isinstance(head, nn.Linear) and head.out_features == 1]
        if len(heads) != 1:
            raise ConfigError(
                f"{type(model).__name__} has {len(heads)} linear heads with one output, and a critic needs exactly "
                "one: use another kind of model"
            )
        self._head = (heads[0],)  # a tuple, or the head would be registered twice

    def forward(self, packed: PackedSequences) -> Tensor:
        """Return ``[N]`` float32, the value at the position before each trained token."""
        states = self.states(packed)
        with torch.autocast(states.device.type, enabled=False):  # bfloat16 has only three digits
            values: Tensor = self._head[0](states.float())
        return values[:, 0].clone()  # FSDP cannot guard a view
