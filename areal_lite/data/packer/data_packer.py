"""What stands between a dataset's rows, the engine and the trainer: one object per kind of model.

The run asks it for what a workflow gets (``get_rollout_input``), hands it each recorded sequence
(``get_policy_input``), and trains on what it collates. All of it on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from areal_lite.api.config import DatasetConfig
from areal_lite.api.dotted_path import load_object
from areal_lite.api.trajectory import TokenSequence
from areal_lite.data.source.sample import Sample
from areal_lite.errors import ConfigError

RolloutOutput = str | list[int] | TokenSequence | Sample
"""An answer's text, its ids, or what was recorded: prompt, answers and the text between. A run gives sequences."""


class DataPacker(ABC):
    """Five hooks; :meth:`setup` runs before any of them."""

    tokenizer: Any = None
    processor: Any = None
    config: DatasetConfig = DatasetConfig(path="")
    """The section of the rows; the defaults where the rows come from no file."""

    def setup(self, *, tokenizer: Any, processor: Any = None, config: DatasetConfig | None = None) -> None:
        """Take what the run has loaded.

        Args:
            tokenizer: The model's Hugging Face tokenizer.
            processor: Its multi-modal processor, where it has one.
            config: The section of the rows.
        """
        self.tokenizer, self.processor = tokenizer, processor
        if config is not None:
            self.config = config

    @abstractmethod
    def get_rollout_input(self, item: Any) -> Any:
        """Return what a workflow gets for one dataset row."""
        raise NotImplementedError("get_rollout_input is for the subclass to write")

    def rollout_collate_fn(self, items: list[Any]) -> list[Any]:
        """Return one mini-batch of inputs, one for each of ``items`` in order; the list itself by default."""
        return items

    @abstractmethod
    def get_policy_input(self, sample: Any, rollout_output: RolloutOutput) -> Any:
        """Return the training sequence for one dataset row and one of its answers."""
        raise NotImplementedError("get_policy_input is for the subclass to write")

    @abstractmethod
    def policy_compute_max_len(self, processed_samples: Sequence[Any]) -> int:
        """Return the length, in tokens, of the longest of a mini-batch; it may then be rounded up."""
        raise NotImplementedError("policy_compute_max_len is for the subclass to write")

    @abstractmethod
    def policy_collate_fn(self, processed_samples: Sequence[Any], computed_max_len: int) -> dict[str, Any]:
        """Return the mini-batch padded to ``computed_max_len``, with the keys of a training batch."""
        raise NotImplementedError("policy_collate_fn is for the subclass to write")


_DECODER_ONLY = "areal_lite.data.packer.decoder_only_llm_packer.DecoderOnlyLLMDataPacker"

# A dotted path is imported when its packer is asked for.
_packers: dict[str, str | type[DataPacker]] = {
    "llama": _DECODER_ONLY,
    "qwen2": _DECODER_ONLY,
    "qwen3": _DECODER_ONLY,
    "qwen3_moe": _DECODER_ONLY,
    "deepseek_v3": _DECODER_ONLY,
    "qwen2_5_vl": "areal_lite.data.vision.qwen2_5_vlm_packer.Qwen2_5_VLM_DataPacker",
}

PackerClass = TypeVar("PackerClass", bound=type[DataPacker])


def register_data_packer(*model_types: str) -> Callable[[PackerClass], PackerClass]:
    """Return a class decorator that makes a packer the one of these ``model_type``s of Hugging Face configs.

    Raises:
        ConfigError: If one of them has a packer already; then none is registered.
    """

    def register(packer: PackerClass) -> PackerClass:
        for model_type in model_types:
            other = _packers.get(model_type, packer)
            if other is not packer:
                name = other if isinstance(other, str) else other.__name__
                raise ConfigError(
                    f"model type {model_type!r} has the packer {name} already: name yours in the YAML, "
                    "data_packer: package.module.Class"
                )
        _packers.update(dict.fromkeys(model_types, packer))
        return packer

    return register


def make_data_packer(model_type: str, path: str | None = None) -> DataPacker:
    """Return a new packer: the class at the dotted ``path``, else the one of ``model_type``.

    A model type nobody registered gets the packer of decoder-only language models.

    Raises:
        ConfigError: If ``path`` names no DataPacker class.
        TypeError: If the class lacks a hook.
    """
    packer = path if path is not None else _packers.get(model_type, _DECODER_ONLY)
    if isinstance(packer, str):
        packer = load_object(packer, where="data_packer")
    if not (isinstance(packer, type) and issubclass(packer, DataPacker)):
        raise ConfigError(
            f"data_packer is {path!r}: it must be a subclass of areal_lite.data.packer.data_packer.DataPacker"
        )
    return packer()
