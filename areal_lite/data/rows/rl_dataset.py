"""Rows and the tensors of their prompts as a torch dataset, under verl's names.

For training loops of your own; a run reads :class:`PromptRows`. Guarantees that every item has the same tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.chat.prompt_encoder import EncodedPrompt, PromptEncoder, kept_places
from areal_lite.data.rows.added_columns import tool_columns
from areal_lite.data.rows.prompt_rows import DynamicGenRows, PromptRows, make_dataset
from areal_lite.data.vision.multimodal import MultimodalEncoder
from areal_lite.data.vision.rope_positions import multimodal_position_ids
from areal_lite.errors import ConfigError

Truncation = Literal["error", "left", "right", "middle"]


class RLHFDataset(PromptRows):
    """Rows, and the tensors of their prompts. See :class:`PromptRows` for arguments and errors."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the row at ``index`` with its prompt replaced by tensors; ConfigError, with the index, if that fails.

        ``T`` is the config's max_prompt_length, or the prompt's length if that is null:

        * ``input_ids``, ``attention_mask``: ``[T]`` int64, padded on the left
        * ``position_ids``: ``[T]`` int64, or ``[4, T]`` for models with M-RoPE
        * ``raw_prompt_ids``: list of the prompt's ids, truncated like ``input_ids`` but not padded
        * ``index``, ``tools_kwargs``, ``interaction_kwargs``: from ``extra_info``; default 0, {} and {}
        * ``raw_prompt`` (messages) with return_raw_chat, ``full_prompts`` (text) with return_full_prompt
        * ``multi_modal_data``, ``multi_modal_inputs`` if the row has images or videos
        * the other columns of the row
        """
        encoder = self._encoder("encoding prompts")
        row = self.rows[index]
        columns = row if isinstance(row, Mapping) else {}
        try:
            self._check_column(row, "prompt_key")
            extra = columns.get("extra_info") or {}
            if not isinstance(extra, Mapping):
                raise ConfigError(f"extra_info is {extra!r}: it must be a dict")
            prompt = encoder.encode(row)
            forms = encoder.forms(prompt)
            tensors = self._tensors(prompt, forms["raw_prompt_ids"])
        except ValueError as error:
            raise ConfigError(f"dataset {self.config.path}, row {index}: {error}") from error
        replaced = (self.config.prompt_key, self.config.image_key, self.config.video_key)
        item = {key: value for key, value in columns.items() if key not in replaced} | tensors | forms
        return item | tool_columns(extra, row, self.config) | prompt.media

    def _encoder_with(self, system_prompt: str | None) -> PromptEncoder:
        if self.processor is None:
            return super()._encoder_with(system_prompt)
        return MultimodalEncoder(self.config, self.tokenizer, system_prompt, self.processor)

    def _tensors(self, prompt: EncodedPrompt, prompt_ids: list[int]) -> dict[str, Any]:
        ids = torch.tensor([prompt_ids], dtype=torch.int64)
        mask = torch.ones_like(ids)
        if (limit := self.config.max_prompt_length) is not None:
            ends = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
            ids, mask = postprocess_data(ids, mask, limit, next((int(token) for token in ends if token is not None), 0))
        positions = multimodal_position_ids(self.processor, ids[0], mask[0], prompt.media.get("multi_modal_inputs", {}))
        return {
            "input_ids": ids[0],
            "attention_mask": mask[0],
            "position_ids": compute_position_id_with_mask(mask)[0] if positions is None else positions,
        }


class DynamicGenDataset(DynamicGenRows, RLHFDataset):
    """An :class:`RLHFDataset` to which the generator ``config.datagen`` adds rows."""


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: DatasetConfig,
    tokenizer: Any,
    processor: Any,
    is_train: bool = True,
    max_samples: int = -1,
    seed: int = 1,
    system_prompt: str | None = None,
) -> Dataset[Any]:
    """Return the dataset that ``data_config`` names: its ``custom_cls``, rows that grow, or :class:`RLHFDataset`; see
    :func:`make_dataset`, with which it shares arguments and errors."""
    cls = DynamicGenDataset if data_config.datagen is not None and is_train else RLHFDataset
    given = {"data_files": data_paths, "tokenizer": tokenizer, "processor": processor, "max_samples": max_samples}
    return make_dataset(data_config, cls, **given, seed=seed, system_prompt=system_prompt)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Truncation = "error",
) -> tuple[Tensor, Tensor]:
    """Return ids ``[B, T]`` int64 and their mask, 0 at padding, padded or truncated to ``[B, max_length]``.

    ``left_pad`` keeps the last token last. Of longer prompts, truncation left keeps the last tokens, right the first,
    middle the first ``max_length // 2`` and the last; error and invalid arguments raise ValueError.
    """
    if truncation not in get_args(Truncation):
        raise ValueError(f"truncation is {truncation!r}: it must be one of {', '.join(get_args(Truncation))}")
    if input_ids.ndim != 2 or input_ids.shape != attention_mask.shape:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)} must both be [B, T]"
        )
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}: it must be 1 or more")
    length = input_ids.shape[1]
    if length > max_length:
        kept = kept_places(length, max_length, truncation)
        return input_ids[:, kept], attention_mask[:, kept]
    return (
        pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
        pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
    )


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Tensor:
    """Return ``tensors`` with the last dimension padded to ``max_seq_len``; longer ones are unchanged."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return positions ``[..., T]`` that count the tokens of a mask ``[..., T]`` from 0.

    Padding before the tokens has position 0; padding after them repeats the last position:
    ``[0, 0, 1, 1]`` gives ``[0, 0, 0, 1]`` and ``[1, 1, 0, 0]`` gives ``[0, 1, 1, 1]``.
    """
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)
