"""The YAML of supervised training: SFT, DPO and reward models.

``kind`` at the top of a file selects one; a file without it is a reinforcement learning run.
"""

from dataclasses import field
from typing import Annotated, Literal
from pydantic import Field
from pydantic.dataclasses import dataclass
from areal_lite.config.dataset_config import RowsConfig, refuse_template_options
from areal_lite.config.run_config import ExperimentConfig
from areal_lite.config.schema import STRICT, Above0, Count, Positive
from areal_lite.config.trainer_config import LearnerConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConversationsConfig(RowsConfig):
    """Source and tokenization of the conversations."""

    max_length: Annotated[int, Field(ge=2)]
    """Maximum sequence length in tokens. Beyond it, conversations are cut and pairs skipped."""
    end_of_turn: Literal["end_mark", "next_role"] = "end_mark"
    """End of a trained answer if the chat template writes no end mark: nothing, or the special token that begins the
    next message, for models that stop at it (GLM)."""
    num_workers: Count = 0
    """Processes that check the rows at the start and tokenize them ahead of training; 0 uses a thread."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTDatasetConfig(ConversationsConfig):
    """Rows with messages, or with a prompt and a response. Every answer is trained."""

    messages_key: str = "messages"
    """Column of the conversation."""
    response_key: str = "response"
    """Column of the response, for rows without messages."""
    image_key: str = "images"
    """Column of the images that replace <image> in a message, for models that read images."""
    apply_chat_template: bool = True
    """False concatenates the texts without a chat template."""

    def __post_init__(self) -> None:
        refuse_template_options(self)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferenceDatasetConfig(ConversationsConfig):
    """Rows with a chosen and a rejected answer."""

    chosen_key: str = "chosen"
    """Column of the chosen answer: the whole conversation, or what follows the prompt."""
    rejected_key: str = "rejected"
    """Column of the rejected answer."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisedTrainerConfig(LearnerConfig):
    """Supervised training."""

    batch_size: Positive
    """Sequences or pairs per update."""
    epochs: Positive = 1
    """Passes over the rows."""
    total_steps: Positive | None = None
    """Number of updates. Null trains for all epochs."""
    max_inference_length_per_device: Positive | None = None
    """Maximum tokens, with padding, per forward pass and rank in evaluation. Null is max_tokens_per_microbatch."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule after warm-up; linear and cosine decay to 0 at the last step."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Fraction of the updates used for warm-up; replaces warmup_steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_ratio is not None and self.warmup_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and warmup_ratio {self.warmup_ratio}: both set the same thing, "
                "so remove one"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTTrainerConfig(SupervisedTrainerConfig):
    """Supervised fine-tuning."""

    averaging: Literal["token", "sequence"] = "token"
    """Average the loss over trained tokens, or over sequences."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPOTrainerConfig(SupervisedTrainerConfig):
    """Direct preference optimization (arXiv:2305.18290); the starting model is the reference."""

    beta: Above0 = 0.1
    """Strength of the constraint towards the reference model."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModelTrainerConfig(SupervisedTrainerConfig):
    """Reward model training on pairs (Bradley-Terry)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora is not None:
            raise ValueError("lora is set, but reward models do not support adapters: set lora to null")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeldOutConfig:
    """When to evaluate the loss on held-out rows. A run always evaluates at its start and end."""

    every_steps: Positive | None = None
    """Also evaluate every this many updates."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisedConfig(ExperimentConfig):
    """Settings of every supervised run."""

    kind: str
    """Kind of run: sft, dpo or reward_model."""
    train_dataset: ConversationsConfig
    """Training rows."""
    eval_dataset: ConversationsConfig | None = None
    """Held-out rows. Null skips evaluation."""
    trainer: SupervisedTrainerConfig
    """Optimizer and training settings."""
    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)
    """When to evaluate."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTConfig(SupervisedConfig):
    """The YAML of ``areal-lite sft``: supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    train_dataset: SFTDatasetConfig
    eval_dataset: SFTDatasetConfig | None = None
    trainer: SFTTrainerConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPOConfig(SupervisedConfig):
    """The YAML of ``areal-lite dpo``: direct preference optimization."""

    kind: Literal["dpo"] = "dpo"
    train_dataset: PreferenceDatasetConfig
    eval_dataset: PreferenceDatasetConfig | None = None
    trainer: DPOTrainerConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModelConfig(SupervisedConfig):
    """The YAML of ``areal-lite reward-model``: a reward model trained on pairs."""

    kind: Literal["reward_model"] = "reward_model"
    train_dataset: PreferenceDatasetConfig
    eval_dataset: PreferenceDatasetConfig | None = None
    trainer: RewardModelTrainerConfig
