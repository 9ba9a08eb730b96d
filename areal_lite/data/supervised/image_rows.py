"""Images of conversations that train: from a row to spans among its ids, and as columns of an item.

Guarantees that each image part of a conversation is one span, that no token of an image trains, and that a cut leaves
whole images. Pixels are not in items: the run's image store has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal_lite.api.image_span import Images, ImageSpan
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.supervised_config import SFTDatasetConfig
from areal_lite.data.chat.chat_template import Message
from areal_lite.data.chat.chat_tokens import ChatTokens
from areal_lite.data.vision.canonical_image import CanonicalImage, canonical_image
from areal_lite.data.vision.image_encoder import ImageEncoder, ImageRef
from areal_lite.data.vision.image_source import image_bytes
from areal_lite.data.vision.multimodal import build_messages, media_values
from areal_lite.errors import ConfigError


class ImageTokens(NamedTuple):
    """Tokens of a sequence, images expanded."""

    input_ids: list[int]
    loss_mask: list[bool]
    images: Images = ()

    def cut(self, max_length: int) -> ImageTokens:
        """Return at most the first ``max_length`` tokens, fewer if the last ones were a part of an image."""
        end = min([max_length, *(span.offset for span in self.images if span.end > max_length)])
        kept = tuple(span for span in self.images if span.end <= end)
        return ImageTokens(self.input_ids[:end], self.loss_mask[:end], kept)


def take_images(
    messages: Sequence[Message], row: Mapping[str, Any], config: SFTDatasetConfig, encoder: ImageEncoder
) -> tuple[Sequence[Message], tuple[CanonicalImage, ...]]:
    """Return the messages with an empty part for each image, and the images in their order.

    Raises:
        ConfigError: If an image cannot be read, an answer has one, a part is neither text nor image, or a text spells a
            token of images.
    """
    keys = DatasetConfig(
        path=config.path, prompt_key="messages", image_key=config.image_key, image_urls=config.image_urls
    )
    columns = {key: row.get(key) for key in (keys.image_key, keys.video_key)}
    built = build_messages({"messages": list(messages), **columns}, keys)
    if other := _parts(built, "video", "image_url"):
        raise ConfigError(
            f"the row has a part of type {other[0]['type']!r}, which SFT does not read: give images, also frames of a "
            'video, as {"type": "image", "image": ...}'
        )
    if _parts([message for message in built if message["role"] == "assistant"], "image"):
        raise ConfigError("an answer has an image, which no model here writes: move it to a message of another role")
    for text in _texts(built):
        if (mark := encoder.mark_in(text)) is not None:
            raise ConfigError(f"a text spells {mark!r}, which stands for images: remove it, and give images as parts")
    values = media_values(built, columns, keys).get("image", [])
    images = tuple(canonical_image(image_bytes(value, config), encoder.processor) for value in values)
    empty = [
        {**message, "content": [{"type": "image"} if part.get("type") == "image" else part for part in content]}
        if isinstance(content := message["content"], list)
        else message
        for message in built
    ]
    return empty, images


def refuse_images(messages: Sequence[Message], row: Mapping[str, Any] | None = None, image_key: str = "") -> None:
    """Raise ConfigError if a conversation, or the column of a row, has images or videos."""
    if _parts(messages, "image", "image_url", "video") or (row or {}).get(image_key):
        raise ConfigError(
            "the row has images or videos, and only SFT of a model that reads images takes images: remove them, or use "
            "such a model"
        )


def expanded(tokens: ChatTokens, images: Sequence[CanonicalImage], encoder: ImageEncoder) -> ImageTokens:
    """Return the tokens, which have one placeholder for each image, with all placeholders of each."""
    ids, spans = encoder.expanded(tokens.input_ids, [ImageRef(image.sha256, image.grid) for image in images])
    repeats = np.ones(len(tokens.input_ids), np.int64)
    around = len(ids) - len(tokens.input_ids) - sum(span.length - 1 for span in spans)
    if spans:
        places = np.array(tokens.input_ids) == encoder.placeholder_id
        repeats[places] = [span.length + around // len(spans) for span in spans]
    return ImageTokens(ids, np.repeat(np.array(tokens.loss_mask, bool), repeats).tolist(), spans)


def image_columns(images: Images) -> dict[str, Tensor]:
    """Return spans as tensors: ``image_spans`` ``[n, 5]`` offset, length and grid, and ``image_hashes`` ``[n, 32]``."""
    if not images:
        return {}
    hashes = [list(bytes.fromhex(span.sha256)) for span in images]
    return {
        "image_spans": torch.tensor([[span.offset, span.length, *span.grid] for span in images]),
        "image_hashes": torch.tensor(hashes, dtype=torch.uint8),
    }


def item_images(item: Mapping[str, Tensor]) -> Images:
    """Return the spans of :func:`image_columns`."""
    if "image_spans" not in item:
        return ()
    hashes = [bytes(row).hex() for row in item["image_hashes"].tolist()]
    rows = item["image_spans"].tolist()
    return tuple(ImageSpan(o, n, sha, (t, h, w)) for (o, n, t, h, w), sha in zip(rows, hashes, strict=True))


def _parts(messages: Sequence[Message], *kinds: str) -> list[Mapping[str, Any]]:
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") in kinds]


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    yield from (message["content"] for message in messages if isinstance(message.get("content"), str))
    yield from (part["text"] for part in _parts(messages, "text") if isinstance(part.get("text"), str))
