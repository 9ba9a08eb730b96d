"""Images and videos of a dataset row, from placeholders in its text to tensors, and prompts that have them.

For training loops of your own; no run takes images. Guarantees that placeholders and media match one to one, in order,
and that the row is not modified. The tensors are the processor's; ``rope_positions`` computes token positions.
"""

from __future__ import annotations
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
import numpy as np
from areal_lite.config.dataset_config import DatasetConfig, RowsConfig
from areal_lite.data.chat.prompt_encoder import EncodedPrompt, PromptEncoder, parts_of, prompt_messages
from areal_lite.data.vision.canonical_image import ImageError, upright_image
from areal_lite.data.vision.image_source import image_bytes
from areal_lite.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


@dataclass(frozen=True)
class MultimodalEncoder(PromptEncoder):
    """Encodes the prompts of rows that may have images and videos; ids hold a placeholder for each patch. The media of
    a prompt are ``image`` (list of PIL images) and ``video`` (list of lists of frames), those that the row has, and the
    processor's other outputs, such as ``pixel_values``."""

    processor: Any = None
    """The model's Hugging Face processor; required."""

    @property
    def renderer(self) -> Any:
        """The owner of the chat template; a processor's template supports images."""
        return self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer

    def row_messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return build_messages(row, self.config)

    def tokenized(self, row: Mapping[str, Any], messages: list[dict[str, Any]], text: str) -> EncodedPrompt:
        if not (data := load_media(messages, row, self.config)):
            return super().tokenized(row, messages, text)
        inputs = processor_inputs(self.processor, text, data)
        ids = inputs.pop("input_ids")[0].tolist()
        del inputs["attention_mask"]
        prompt_media = {"multi_modal_data": data, "multi_modal_inputs": inputs}
        return EncodedPrompt(messages=messages, text=text, input_ids=ids, media=prompt_media)


def build_messages(row: Mapping[str, Any], keys: DatasetConfig) -> list[dict[str, Any]]:
    """Return the row's prompt as messages with each image and video as a separate part. If the row has a column of
    images, "Look: <image>" becomes the parts ``{"type": "text", "text": "Look: "}`` and ``{"type": "image"}``; the same
    for videos. A content of parts is kept, without the None keys that tables add."""
    kinds = {kind for kind, key in _columns(keys) if row.get(key) is not None}
    messages = [
        {**message, "content": _split(message["content"], kinds)} for message in prompt_messages(row, keys.prompt_key)
    ]
    for kind, key in _columns(keys):
        needed = sum(_inline(part, kind) is None for part in parts_of(messages, kind))
        if needed != (given := len(_column(row, key))):
            raise ConfigError(
                f"the prompt has {needed} {kind} placeholders, but {key!r} has {given}: write a <{kind}> for each"
            )
    return messages


def media_values(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], keys: DatasetConfig) -> dict[str, Any]:
    """Return the values of ``image`` and ``video`` that there are, in the order of their parts, not yet loaded. A part
    without a value of its own takes the next one of the row's column."""
    media = {}
    for kind, key in _columns(keys):
        rest = iter(_column(row, key))
        if parts := parts_of(messages, kind):
            media[kind] = [next(rest) if (value := _inline(part, kind)) is None else value for part in parts]
    return media


def load_media(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], keys: DatasetConfig) -> dict[str, Any]:
    """Return :func:`media_values` loaded: ``image`` (list of PIL images) and ``video`` (list of lists of frames)."""
    load = {"image": load_images, "video": load_videos}
    return {kind: load[kind](values, keys) for kind, values in media_values(messages, row, keys).items()}


def _columns(keys: DatasetConfig) -> tuple[tuple[str, str], ...]:
    return ("image", keys.image_key), ("video", keys.video_key)


def _column(row: Mapping[str, Any], key: str) -> list[Any]:
    value = row.get(key)
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def load_images(values: Sequence[Any], rows: RowsConfig) -> list[Image]:
    """Return ``values``, which are those of :func:`image_bytes`, as PIL images in RGB, or raise ConfigError."""
    images = []
    for number, value in enumerate(values):
        try:
            images.append(upright_image(image_bytes(value, rows)))
        except (OSError, TypeError, ValueError, ImageError) as error:  # PIL has no error class of its own
            raise ConfigError(
                f"image {number} of {len(values)} cannot be read from {_describe(value)} ({error}): give a PIL image, "
                "a path, a data URL, the bytes of an image file, or a uint8 array [H, W, C]"
            ) from error
    return images


def load_videos(values: Sequence[Any], rows: RowsConfig) -> list[list[Image]]:
    """Return the frames of each video, a list of images as in :func:`load_images` or a uint8 array ``[T, H, W, C]``, as
    PIL images in RGB; ConfigError if a value is a video file or has another type, or a frame cannot be read."""
    videos = []
    for number, value in enumerate(values):
        frames = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 4)
        if not frames or len(value) == 0:
            raise ConfigError(
                f"video {number} of {len(values)} is {_describe(value)}: video files are not decoded here, so give at "
                "least one frame: a list of images, or a uint8 array [T, H, W, C]"
            )
        videos.append(load_images(list(value), rows))
    return videos


def processor_inputs(processor: Any, text: str, media: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the processor's model inputs for one text, which has one placeholder token per image and video."""
    import torch

    try:
        inputs = processor(
            text=[text],
            images=media.get("image") or None,
            videos=media.get("video") or None,
            add_special_tokens=False,
            return_tensors="pt",
        )
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{type(processor).__name__} rejects a text with {len(media.get('image', ()))} images and "
            f"{len(media.get('video', ()))} videos: {error}"
        ) from error
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def _split(content: Any, kinds: set[str]) -> Any:
    if not isinstance(content, str) or not kinds:
        return content
    parts = re.split(f"<({'|'.join(sorted(kinds))})>", content)
    if len(parts) == 1:
        return content
    made = ({"type": "text", "text": part} if not at % 2 else {"type": part} for at, part in enumerate(parts))
    return [part for part in made if part.get("text") != ""]


def _inline(part: Mapping[str, Any], kind: str) -> Any:
    return next((part[key] for key in (kind, "url", "path") if key in part), None)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype} and shape {list(value.shape)}"
    return f"{str(value)[:80]!r}" if isinstance(value, str | Path) else f"a {type(value).__name__}"
