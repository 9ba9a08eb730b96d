"""The images of one session's requests: taken out of the messages, checked, and stored.

Guarantees that messages hold no pixels once they are parsed: a part is its digest and, once it is stored, the name of
its image. An image that is sent again, with the whole conversation, is not decoded again.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from areal_lite.agents.session.request_fields import RequestError, short
from areal_lite.data.chat.prompt_encoder import parts_of
from areal_lite.data.vision.canonical_image import CanonicalImage, ImageError
from areal_lite.data.vision.image_encoder import ImageEncoder
from areal_lite.data.vision.image_processor import FAMILIES

MAX_IMAGES = 16
"""Images of a request, those of its earlier messages included."""


class ImagePart(dict[str, Any]):
    """A part of a message for the chat template; no JSON becomes one."""

    def __init__(self, url: str, digest: str, where: str) -> None:
        super().__init__(type="image", digest=digest)
        self.url = url
        """The data URL until the image is stored, then empty."""
        self.where = where
        """The part's place in the request that had it first."""
        self.ref: CanonicalImage | None = None


class RequestImages:
    def __init__(self, encoder: ImageEncoder | None) -> None:
        self._encoder = encoder
        self._parts: dict[str, ImagePart] = {}

    def take(self, raw: list[Any], first: int) -> list[Any]:
        """Return messages of a chat completion, from number ``first`` on, with their images as :class:`ImagePart`."""
        taken = []
        for index, message in enumerate(raw, first):
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list) and any(_is_image(part) for part in content):
                where = f"messages[{index}].content"
                parts = [self._part(p, f"{where}[{i}]") if _is_image(p) else p for i, p in enumerate(content)]
                message = {**message, "content": parts}
            taken.append(message)
        return taken

    def _part(self, part: dict[str, Any], where: str) -> ImagePart:
        if self._encoder is None:
            raise RequestError(
                f"{where} is an image, but only text is supported: images need a run of {', '.join(FAMILIES)}",
                param=where,
            )
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str) or not url.startswith("data:"):
            raise RequestError(
                f"{where} is an image at {short(url)}: send its bytes, data:image/png;base64,...", param=where
            )
        digest = hashlib.blake2b(url.encode(errors="replace"), digest_size=32).hexdigest()
        return self._parts.setdefault(digest, ImagePart(url, digest, where))

    async def store(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Decode and store the images that are new; raises RequestError, which names the part, for a bad one."""
        for part in image_parts(messages):
            if part.ref is not None:
                continue
            assert self._encoder is not None, "it made the part"
            try:
                part.ref = await asyncio.to_thread(self._encoder.stored, part.url)
            except ImageError as error:
                self._parts.pop(part["digest"], None)
                raise RequestError(f"{part.where}: {error}", param=part.where) from None
            part.url = ""


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def image_parts(messages: Iterable[Mapping[str, Any]]) -> list[ImagePart]:
    """Return the images of messages in order."""
    return [part for part in parts_of(messages, "image") if isinstance(part, ImagePart)]


def check_count(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a request with more than :data:`MAX_IMAGES`; names the message that has one too many."""
    if len(image_parts(messages)) > MAX_IMAGES:
        index = next(index for index in range(len(messages)) if len(image_parts(messages[: index + 1])) > MAX_IMAGES)
        where = f"messages[{index}]"
        raise RequestError(f"{where}: the request has over {MAX_IMAGES} images: send fewer", param=where)
