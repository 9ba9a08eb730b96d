"""An image in its one form: RGB, upright, at the size that the model's image processor picks, as PNG.

Guarantees that an image is checked before its pixels are decoded, and that its canonical form stays as it is when a
processor reads it again, here or in a server: equal pixels to the bit. Its sha256 is its identity.
"""

from __future__ import annotations
import hashlib
import io
from typing import TYPE_CHECKING, NamedTuple
from areal_lite.data.vision.image_processor import Grid, ImageProcessor
from areal_lite.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ENCODED_BYTES = 20_000_000
MAX_PIXELS = 16_000_000
"""Of an image before it is resized; far below the size at which Pillow warns of a decompression bomb."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PASSES = 4


class ImageError(ConfigError):
    """An image that cannot be read or is too large; its text says what to send instead."""


class CanonicalImage(NamedTuple):
    png: bytes
    sha256: str
    """Hex digest of ``png``."""
    grid: Grid
    """Patches along time, height and width."""


def canonical_image(source: bytes, processor: ImageProcessor) -> CanonicalImage:
    """Return the canonical form of the bytes of an image file; of an animation, its first frame. ImageError if it is no
    PNG, JPEG, WebP or GIF, is damaged, or has too many bytes or pixels."""
    upright = upright_image(source)
    before, size = None, (upright.height, upright.width)
    try:
        for _ in range(_PASSES):
            before, size = size, processor.size(*size)
    except ValueError as error:
        raise ImageError(f"{error}: send an image that is less narrow") from None
    if size != before:
        raise ImageError(f"{size[1]} x {size[0]} pixels have no stable size: send an image that is less narrow")
    height, width = size
    file = io.BytesIO()
    upright.resize((width, height), processor.resample).save(file, "PNG", compress_level=1)
    png = file.getvalue()
    return CanonicalImage(png, hashlib.sha256(png).hexdigest(), processor.grid(height, width))


def upright_image(source: bytes) -> Image:
    """Return an image file's first frame in RGB, rotated as its camera was; errors as :func:`canonical_image`."""
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError as error:
        raise ConfigError("images need pillow: pip install pillow") from error
    if len(source) > MAX_ENCODED_BYTES:
        raise ImageError(f"the image has {len(source):,} bytes: send at most {MAX_ENCODED_BYTES:,}")
    try:
        with Image.open(io.BytesIO(source), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageError(f"the image has {width} x {height} pixels: send at most {MAX_PIXELS:,}")
            return ImageOps.exif_transpose(image).convert("RGB")
    except ImageError:
        raise
    except Exception as error:  # decoders of damaged files raise anything
        raise ImageError(
            f"the image cannot be read ({type(error).__name__}: {str(error)[:200]}): send a whole PNG, JPEG, "
            "WebP or GIF"
        ) from error
