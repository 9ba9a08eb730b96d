"""The packer of Qwen2.5-VL, and the pattern for other image models: engine and trainer share one transform of the row.

Guarantees that a training sequence is what the engine recorded, which has all tokens of its images, and that a batch
whose tokens and images do not fit is refused.
"""

from __future__ import annotations
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.packer.data_packer import RolloutOutput
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker, mask_prefix
from areal_lite.data.source.sample import Sample
from areal_lite.data.vision.multimodal import MultimodalEncoder, load_media, processor_inputs
from areal_lite.errors import ConfigError

_PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")


class Qwen2_5_VLM_DataPacker(DecoderOnlyLLMDataPacker):
    """Rows are conversations, or dicts with a prompt and optional columns of images and videos."""

    tokens_per_second: float = 2.0
    """``vision_config.tokens_per_second`` of the model's config: positions per second of video."""

    def setup(self, *, tokenizer: Any, processor: Any = None, config: DatasetConfig | None = None) -> None:
        if processor is None:
            raise ConfigError(
                f"{type(self).__name__} needs the model's processor, and none was loaded: pip "
                "install pillow (torchvision for videos), and name a model folder with preprocessor_config.json"
            )
        super().setup(tokenizer=tokenizer, processor=processor, config=config)

    @property
    def encoder(self) -> MultimodalEncoder:
        return MultimodalEncoder(self.config, self.tokenizer, processor=self.processor)

    def get_rollout_input(self, item: Any) -> dict[str, Any]:
        """Return the prompt as input for an engine with a vision tower.

        ``item`` is a list of messages whose content is text or parts, ``{"type": "image", "image": path or URL}`` and
        ``{"type": "text", "text": ...}``; or a dict with such a prompt (or text, the user's message), where ``<image>``
        and parts without an image take theirs from the column of images; or a result of this method.

        The result is ``{"prompt": text, "multi_modal_data": {"image": [PIL images], "video": [[frames]]}}``, with the
        config's ``prompt_key`` and only the kinds present. A dict keeps its other columns.
        """
        config = self.config
        if isinstance(item, Mapping) and "multi_modal_data" in item:
            return dict(item)
        row = item if isinstance(item, Mapping) else {config.prompt_key: item}
        messages = self.encoder.messages(row)
        return {key: row[key] for key in row if key not in (config.image_key, config.video_key)} | {
            config.prompt_key: self.encoder.rendered(messages, row),
            "multi_modal_data": load_media(messages, row, config),
        }

    def get_policy_input(
        self, sample: Any, rollout_output: RolloutOutput, n_ignore_prefix_tokens: int = 0
    ) -> TokenSequence:
        """Return the training sequence of one answer, with ``multi_modal_inputs`` if the row has images or videos.
        ``sample`` is what :meth:`get_rollout_input` takes, or a :class:`Sample` with it as its row or prompt."""
        row = (sample.row or sample.prompt) if isinstance(sample, Sample) else sample
        item = self.get_rollout_input(row)
        inputs = processor_inputs(self.processor, item[self.config.prompt_key], item["multi_modal_data"])
        prompt_ids = inputs["input_ids"][0].tolist()
        multi_modal_inputs = {name: value for name, value in inputs.items() if name not in _PER_TOKEN}
        if not isinstance(rollout_output, Sample | TokenSequence):
            row = sample if isinstance(sample, Sample) else item
            rollout_output = self.single_turn_sample(row, prompt_ids, rollout_output)
        trained = mask_prefix(rollout_output, n_ignore_prefix_tokens)
        return dataclasses.replace(trained, multi_modal_inputs=multi_modal_inputs or None)

    def policy_collate_fn(self, processed_samples: Sequence[TokenSequence], computed_max_len: int) -> dict[str, Any]:
        """Return the batch as for decoder-only models, and ``position_ids`` ``[B, 4, T]`` int64. A model with plain
        positions gets none. Others take them as ``[4, B, T]``, and ``multi_modal_inputs`` concatenated along dim 0.
        ValueError if recorded placeholders do not fit their images."""
        import torch
        from areal_lite.data.vision.rope_positions import multimodal_position_ids

        batch = super().policy_collate_fn(processed_samples, computed_max_len)
        positions = [
            multimodal_position_ids(
                self.processor, ids, mask, sequence.multi_modal_inputs or {}, tokens_per_second=self.tokens_per_second
            )
            for ids, mask, sequence in zip(batch["input_ids"], batch["attention_mask"], processed_samples, strict=True)
        ]
        placed = [position for position in positions if position is not None]
        return batch | {"position_ids": torch.stack(placed)} if placed else batch
