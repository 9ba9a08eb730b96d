"""The YAML of supervised training: fine-tuning on answers, preference pairs, reward models.

``kind`` at the top of a file says which; a file without it is one of reinforcement learning.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from areal_lite.api.config import ExperimentConfig, Positive, RowsConfig
from areal_lite.api.schema import STRICT
from areal_lite.api.trainer_config import Above0, LearnerConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConversationsConfig(RowsConfig):
    """Where conversations come from, and how they become tokens."""

    max_length: Annotated[int, Field(ge=2)]
    """Longest sequence in tokens. No default: what is beyond it is not trained."""

    prompt_key: str = "prompt"
    """Column of what is answered: text, or a list of messages."""

    tools_key: str = "tools"
    """Column of tool schemas that the chat template renders; may be missing."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables of the chat template, or another chat_template."""

    num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that tokenize; 0 is the run's own."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTDatasetConfig(ConversationsConfig):
    """Rows with messages, or with a prompt and a response; every answer in them is trained."""

    messages_key: str = "messages"
    """Column of the conversation."""

    response_key: str = "response"
    """Column of the text that is trained, where there are no messages."""

    apply_chat_template: bool = True
    """False joins texts as they are."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferenceDatasetConfig(ConversationsConfig):
    """Rows with a better and a worse answer."""

    chosen_key: str = "chosen"
    """Column of the better one: the whole conversation, or what follows the prompt."""

    rejected_key: str = "rejected"
    """Column of the worse one."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisedTrainerConfig(LearnerConfig):
    """How weights are learned from rows."""

    batch_size: Positive
    """Sequences, or pairs, of one update. No default: it decides what the learning rate means."""

    epochs: Positive = 1
    """Times every row is trained."""

    total_steps: Positive | None = None
    """Updates; null: as many as the epochs have batches."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warm-up, down to 0 at the last step."""

    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the updates that warm up, in place of warmup_steps."""

    def __post_init__(self) -> None:
        if self.warmup_ratio is not None and self.warmup_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and warmup_ratio {self.warmup_ratio}: one is made of the other, "
                "so remove one"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTTrainerConfig(SupervisedTrainerConfig):
    """How weights are learned from answers."""

    averaging: Literal["token", "sequence"] = "token"
    """What counts the same in the loss of an update: each trained token, or each sequence."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPOTrainerConfig(SupervisedTrainerConfig):
    """How weights are learned from pairs (DPO, arXiv:2305.18290); the reference is the model the run begins with."""

    beta: Above0 = 0.1
    """How strongly the policy is held to the reference."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs taken to be labelled the wrong way round."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModelTrainerConfig(SupervisedTrainerConfig):
    """How a reward model learns from pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora is not None:
            raise ValueError("lora is set, and a reward model is saved without adapters: set lora to null")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeldOutConfig:
    """When the loss on held-out rows is computed; always at the start and at the end."""

    every_steps: Positive | None = None
    """Also after every so many updates."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisedConfig(ExperimentConfig):
    """What all runs of supervised training have."""

    kind: str
    """What the file trains; areal-lite config knows it by this."""

    train_dataset: ConversationsConfig
    """Rows to train on."""

    eval_dataset: ConversationsConfig | None = None
    """Held-out rows; null skips evaluation."""

    trainer: SupervisedTrainerConfig
    """The learning side."""

    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)
    """When to evaluate."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTConfig(SupervisedConfig):
    """One run of supervised fine-tuning: the whole YAML of ``areal-lite sft``."""

    kind: Literal["sft"] = "sft"
    train_dataset: SFTDatasetConfig
    eval_dataset: SFTDatasetConfig | None = None
    trainer: SFTTrainerConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPOConfig(SupervisedConfig):
    """One run of direct preference optimisation: the whole YAML of ``areal-lite dpo``."""

    kind: Literal["dpo"] = "dpo"
    train_dataset: PreferenceDatasetConfig
    eval_dataset: PreferenceDatasetConfig | None = None
    trainer: DPOTrainerConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModelConfig(SupervisedConfig):
    """One run that trains a reward model (Bradley-Terry): the whole YAML of ``areal-lite reward-model``."""

    kind: Literal["reward_model"] = "reward_model"
    train_dataset: PreferenceDatasetConfig
    eval_dataset: PreferenceDatasetConfig | None = None
    trainer: RewardModelTrainerConfig


KINDS: dict[str, type[SupervisedConfig]] = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward_model": RewardModelConfig,
}
"""The record of a file by its ``kind``."""
