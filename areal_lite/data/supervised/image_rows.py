"""Images of conversations that train: from a row to spans among its ids.

Guarantees that each image part of a conversation is one span, that no token of an image trains, and that a cut leaves
whole images. Pixels are not in items: the run's image store has them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from areal_lite.api.image_span import Images
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.supervised_config import SFTDatasetConfig
from areal_lite.data.chat.chat_template import Message
from areal_lite.data.chat.chat_tokens import ChatTokens
from areal_lite.data.chat.prompt_encoder import parts_of
from areal_lite.data.vision.canonical_image import CanonicalImage, canonical_image
from areal_lite.data.vision.image_encoder import ImageEncoder
from areal_lite.data.vision.image_source import image_bytes
from areal_lite.data.vision.multimodal import build_messages, media_values
from areal_lite.errors import ConfigError


class ImageTokens(NamedTuple):
    """Tokens of a sequence, images expanded."""

    input_ids: list[int]
    loss_mask: list[bool]
    images: Images = ()

    def cut(self, max_length: int) -> "ImageTokens":
        """Return at most the first ``max_length`` tokens, fewer if the last ones were a part of an image."""
        end = min([max_length, *(span.offset for span in self.images if span.end > max_length)])
        kept = tuple(span for span in self.images if span.end <= end)
        return ImageTokens(self.input_ids[:end], self.loss_mask[:end], kept)


def take_images(
    messages: Sequence[Message], row: Mapping[str, Any], config: SFTDatasetConfig, encoder: ImageEncoder
) -> tuple[Sequence[Message], tuple[CanonicalImage, ...]]:
    """Return the messages with an empty part for each image, and the images in their order. ConfigError if an image
    cannot be read, an answer has one, a part is neither text nor image, or a text spells a token of images."""
    keys = DatasetConfig(path="", prompt_key="messages", image_key=config.image_key)
    row = {"messages": list(messages), **{key: row.get(key) for key in (keys.image_key, keys.video_key)}}
    built = build_messages(row, keys)
    if other := parts_of(built, "video", "image_url"):
        raise ConfigError(
            f"the row has a part of type {other[0]['type']!r}, which SFT does not read: give images, also frames of a "
            'video, as {"type": "image", "image": ...}'
        )
    if parts_of((message for message in built if message["role"] == "assistant"), "image"):
        raise ConfigError("an answer has an image, which no model here writes: move it to a message of another role")
    for text in [message["content"] for message in built] + [part.get("text") for part in parts_of(built, "text")]:
        if isinstance(text, str) and (mark := encoder.mark_in(text)) is not None:
            raise ConfigError(f"a text spells {mark!r}, which stands for images: remove it, and give images as parts")
    values = media_values(built, row, keys).get("image", [])
    images = tuple(canonical_image(image_bytes(value, config), encoder.processor) for value in values)
    for message in built:
        if isinstance(content := message["content"], list):
            message["content"] = [{"type": "image"} if part.get("type") == "image" else part for part in content]
    return built, images


def refuse_images(messages: Sequence[Message], row: Mapping[str, Any] | None = None, image_key: str = "") -> None:
    """Raise ConfigError if a conversation, or the column of a row, has images or videos."""
    if parts_of(messages, "image", "image_url", "video") or (row or {}).get(image_key):
        raise ConfigError(
            "the row has images or videos, and only SFT of a model that reads images takes images: remove them, or use "
            "such a model"
        )


def expanded(tokens: ChatTokens, images: Sequence[CanonicalImage], encoder: ImageEncoder) -> ImageTokens:
    """Return the tokens, which have one placeholder for each image, with all placeholders of each."""
    ids, spans = encoder.expanded(tokens.input_ids, images)
    mask = list(tokens.loss_mask)
    before, after = map(len, encoder.around)
    for span in spans:
        start = span.offset - before
        mask[start : start + 1] = [False] * (before + span.length + after)
    return ImageTokens(ids, mask, spans)
