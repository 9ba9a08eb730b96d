"""Rows and the tensors of their prompts as a torch dataset, under verl's names.

For training loops of your own; a run reads :class:`PromptRows`. Guarantees that every item has the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.chat.prompt_encoder import EncodedPrompt, PromptEncoder
from areal_lite.data.chat.prompt_tensors import compute_position_id_with_mask, postprocess_data
from areal_lite.data.rows.dynamic_dataset import DynamicGenRows, make_dataset
from areal_lite.data.rows.prompt_rows import PromptRows
from areal_lite.data.vision.multimodal import MultimodalEncoder, MultimodalPrompt
from areal_lite.data.vision.rope_positions import multimodal_position_ids
from areal_lite.errors import ConfigError


class RLHFDataset(PromptRows):
    """Rows, and the tensors of their prompts. See :class:`PromptRows` for arguments and errors."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the row at ``index`` with its prompt replaced by tensors.

        ``T`` is the config's max_prompt_length, or the prompt's length if that is null:

        * ``input_ids``, ``attention_mask``: ``[T]`` int64, padded on the left
        * ``position_ids``: ``[T]`` int64, or ``[4, T]`` for models with M-RoPE
        * ``raw_prompt_ids``: list of the prompt's ids, truncated like ``input_ids`` but not padded
        * ``index``, ``tools_kwargs``, ``interaction_kwargs``: from ``extra_info``; default 0, {} and {}
        * ``raw_prompt`` (messages) with return_raw_chat, ``full_prompts`` (text) with return_full_prompt
        * ``multi_modal_data``, ``multi_modal_inputs`` if the row has images or videos
        * the other columns of the row

        Raises:
            ConfigError: If the row cannot be encoded or is too long; with its index.
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
        item["index"] = extra.get("index") or 0
        item["tools_kwargs"] = extra.get("tools_kwargs") or {}
        item["interaction_kwargs"] = extra.get("interaction_kwargs") or {}
        if isinstance(prompt, MultimodalPrompt):
            item["multi_modal_data"] = prompt.multi_modal_data
            item["multi_modal_inputs"] = prompt.multi_modal_inputs
        return item

    def _encoder_with(self, system_prompt: str | None) -> PromptEncoder:
        if self.processor is None:
            return super()._encoder_with(system_prompt)
        return MultimodalEncoder(self.config, self.tokenizer, system_prompt, self.processor)

    def _tensors(self, prompt: EncodedPrompt, prompt_ids: list[int]) -> dict[str, Any]:
        ids = torch.tensor([prompt_ids], dtype=torch.int64)
        mask = torch.ones_like(ids)
        if (limit := self.config.max_prompt_length) is not None:
            ends = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
            padding = next((int(token) for token in ends if token is not None), 0)  # masked out
            ids, mask = postprocess_data(ids, mask, limit, padding)
        positions = None
        if self.processor is not None:
            inputs = prompt.multi_modal_inputs if isinstance(prompt, MultimodalPrompt) else {}
            positions = multimodal_position_ids(self.processor, ids[0], mask[0], inputs)
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
    """Return the dataset that ``data_config`` names: its ``custom_cls``, rows that grow, or :class:`RLHFDataset`.

    See :func:`make_dataset`, with which it shares arguments and errors.
    """
    cls = DynamicGenDataset if data_config.datagen is not None and is_train else RLHFDataset
    given = {"data_files": data_paths, "tokenizer": tokenizer, "processor": processor, "max_samples": max_samples}
    return make_dataset(data_config, cls, **given, seed=seed, system_prompt=system_prompt)
