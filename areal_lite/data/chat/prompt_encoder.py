"""A row's prompt as messages, as the text that the chat template makes of them, and as tokens.

Guarantees that whoever measures a prompt and whoever uses it see the same tokens. Knows nothing of padding.
Copies go to worker processes, so it holds nothing but its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from areal_lite.api.config import DatasetConfig
from areal_lite.data.chat.prompt_text import check_template, plain_messages, render_prompt
from areal_lite.data.vision.multimodal import (
    build_messages,
    column_values,
    load_images,
    load_videos,
    media_values,
    processor_inputs,
)
from areal_lite.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """One prompt in all its forms."""

    messages: list[dict[str, Any]]
    text: str
    input_ids: list[int]
    """Not padded, nothing cut."""
    multi_modal_data: dict[str, Any] = field(default_factory=dict)
    """``image`` and ``video``, lists of PIL images and of frames; what the row has of them."""
    multi_modal_inputs: dict[str, Tensor] = field(default_factory=dict)
    """What the processor made beside the tokens: ``pixel_values`` and the like."""


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Makes the prompts of rows.

    Args:
        config: Keys and arguments of the chat template.
        tokenizer: Hugging Face tokenizer.
        processor: Hugging Face processor where rows have images or videos, else None.

    Raises:
        ConfigError: If there is no chat template, or an argument of the template is not for the user to set.
    """

    config: DatasetConfig
    tokenizer: Any
    processor: Any = None

    def __post_init__(self) -> None:
        check_template(self._renderer, self.config)

    @property
    def _renderer(self) -> Any:
        """Whoever has the chat template: a processor's knows images."""
        return self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the prompt's messages; a text is one message of the user.

        Raises:
            ConfigError: If the prompt is neither text nor messages.
        """
        keys = self.config
        messages = build_messages(
            row, prompt_key=keys.prompt_key, image_key=keys.image_key, video_key=keys.video_key
        )
        if not messages or not all(isinstance(message.get("role"), str) for message in messages):
            raise ConfigError(
                f"the prompt in {keys.prompt_key!r} is {str(row[keys.prompt_key])[:80]!r}: it must be text or a "
                "list of messages, {role, content}"
            )
        return plain_messages(messages)

    def encode(self, row: Mapping[str, Any]) -> EncodedPrompt:
        """Return the prompt of ``row``.

        Raises:
            ConfigError: If the prompt, its images or its tools are not what they should be.
            TemplateError: If the chat template refuses the messages.
        """
        messages = self.messages(row)
        config = self.config
        text = render_prompt(self._renderer, messages, config=config, tools=row.get(config.tools_key))
        images = media_values(messages, "image", column_values(row, self.config.image_key))
        videos = media_values(messages, "video", column_values(row, self.config.video_key))
        if not (images or videos):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return EncodedPrompt(messages=messages, text=text, input_ids=ids)
        if self.processor is None:
            raise ConfigError("the row has images or videos, but there is no processor: pass the model's")
        data: dict[str, Any] = {}
        if images:
            data["image"] = load_images(images)
        if videos:
            data["video"] = load_videos(videos)
        inputs = processor_inputs(self.processor, text, data.get("image", []), data.get("video", []))
        ids = inputs.pop("input_ids")[0].tolist()
        del inputs["attention_mask"]
        return EncodedPrompt(
            messages=messages, text=text, input_ids=ids, multi_modal_data=data, multi_modal_inputs=inputs
        )
