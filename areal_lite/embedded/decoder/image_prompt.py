"""The images of one prompt: checked, and as what the model needs in place of their tokens' embeddings and positions.

Guarantees that a span is what its image is: the PNG has the digest, the size is canonical, grid and length are those of
the served model's own processor. So two requests with equal keys have equal content.
"""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
import torch
from torch import Tensor
from areal_lite.api.image_span import Images, check_images, images_of, keyed_ids
from areal_lite.data.vision.canonical_image import MAX_PIXELS, ImageError
from areal_lite.data.vision.image_processor import ImageProcessor
from areal_lite.data.vision.image_source import base64_bytes
from areal_lite.data.vision.rope_positions import positions_of_spans
from areal_lite.embedded.bad_request import invalid_value


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """Images of a prompt of ``T`` tokens."""

    images: Images
    pngs: Mapping[str, bytes]
    """The canonical file of each image, by its sha256; its pixels are many times as large, and made when computed."""
    keys: list[int]  # ``[T]``, equal where the content is; see :func:`keyed_ids`
    axes: Tensor | None  # ``[3, T]`` time, row and column of each token; None if the model has plain positions

    def positions(self, start: int, count: int) -> Tensor | None:
        """Return ``[3, count]`` of the tokens from column ``start`` on, those after the prompt included."""
        if self.axes is None:
            return None
        known = self.axes[:, start : start + count]
        first, last = max(start, self.axes.shape[1]), start + count
        after = torch.arange(first, last) + (int(self.axes.max()) + 1 - self.axes.shape[1])
        return torch.cat([known, after.expand(3, -1)], 1)


def image_prompt(body: dict[str, Any], prompt: list[int], processor: ImageProcessor | None) -> ImagePrompt | None:
    """Return the images of a ``/generate`` body, ``images`` and ``image_files``; None without; raises BadRequest."""
    if not body.get("images"):
        return None
    if processor is None:
        raise invalid_value("images: the served model reads no images; leave them out.")
    try:
        images = images_of(body["images"])
        check_images(images, len(prompt))
        files = body["image_files"] if isinstance(body.get("image_files"), dict) else {}
        pngs = {sha256: _png(sha256, files.get(sha256)) for sha256 in {span.sha256 for span in images}}
        grids = {sha256: _grid(png, processor) for sha256, png in pngs.items()}
        for number, span in enumerate(images):
            grid = grids[span.sha256]
            if (span.grid, span.length) != (grid, processor.num_tokens(grid)):
                raise ValueError(
                    f"image {number} has grid {list(span.grid)} and {span.length} tokens; with the processor of the "
                    f"served model it has {list(grid)} and {processor.num_tokens(grid)}"
                )
    except (ValueError, ImageError) as error:
        raise invalid_value(f"images: {error}.") from None
    axes = positions_of_spans(len(prompt), images, merge_size=processor.merge_size) if processor.has_axes else None
    return ImagePrompt(images=images, pngs=pngs, keys=keyed_ids(prompt, images), axes=axes)


def _png(sha256: str, encoded: Any) -> bytes:
    if not isinstance(encoded, str):
        raise ValueError(f"image_files has no {sha256}: send its PNG in base64")
    png = base64_bytes(encoded)
    if hashlib.sha256(png).hexdigest() != sha256:
        raise ValueError(f"image_files has another image for {sha256}: its digest differs")
    return png


def _grid(png: bytes, processor: ImageProcessor) -> tuple[int, int, int]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            width, height = image.size
            if width * height > MAX_PIXELS or processor.size(height, width) != (height, width):
                raise ValueError(f"its size {width} x {height} is not one that the processor leaves as it is")
            image.load()
    except Exception as error:  # decoders of damaged files raise anything
        raise ValueError(f"an image is not canonical ({error})") from None
    return processor.grid(height, width)
