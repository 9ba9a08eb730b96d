"""Image processors of the models that read images, made from a model's folder with Pillow alone.

Guarantees that the pixels of a canonical image are equal to the bit at every call, whoever makes it: the engine's
server, the trainer and proofs. Only the models of :data:`FAMILIES`, and processors that do not cut an image into tiles.
"""

from __future__ import annotations
import functools
import io
import math
from typing import TYPE_CHECKING, Any
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import stored_config

if TYPE_CHECKING:
    from torch import Tensor

Grid = tuple[int, int, int]


class ImageProcessor:
    """How one model turns an image into pixels and tokens."""

    placeholder: str
    """The token that a chat template writes for an image."""
    before = after = ""
    """Text that belongs around the placeholders of an image and that no chat template writes."""
    marks: tuple[str, ...]
    """Tokens that only images have; a text that has one is refused."""
    has_axes = False
    """True for models that place a token by time, row and column; others have plain positions."""

    def __init__(self, processor: Any, *, patch_size: int, merge_size: int) -> None:
        """Take a processor of transformers; ``merge_size`` patches along each edge make a token."""
        self._processor, self._patch_size, self.merge_size = processor, patch_size, merge_size
        self.settings: str = processor.to_json_string()
        """All that decides its pixels and grids, as JSON."""
        self.resample = processor.resample
        """Pillow's filter for resizing."""

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to; ValueError if it cannot be."""
        raise NotImplementedError(f"{type(self).__name__} says nothing about sizes")

    def grid(self, height: int, width: int) -> Grid:
        """Return the patches of a resized image along time, height and width."""
        return 1, height // self._patch_size, width // self._patch_size

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of placeholder tokens of an image."""
        return math.prod(grid) // self.merge_size**2

    def pixels(self, png: bytes) -> dict[str, Tensor]:
        """Return the model's inputs of one canonical image, such as ``pixel_values`` and ``image_grid_thw``."""
        from PIL import Image

        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            return dict(self._processor(image.convert("RGB"), do_resize=False, return_tensors="pt"))


class QwenImageProcessor(ImageProcessor):
    """Qwen2-VL and Qwen2.5-VL: ``pixel_values`` ``[patches, values]`` and ``image_grid_thw`` ``[1, 3]``."""

    placeholder = "<|image_pad|>"
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    has_axes = True

    def __init__(self, folder: str) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        one = Qwen2VLImageProcessorPil.from_pretrained(folder)  # nosec B615 # a folder
        super().__init__(one, patch_size=one.patch_size, merge_size=one.merge_size)

    def size(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        limits = self._processor.size
        edge = self._patch_size * self.merge_size
        size: tuple[int, int] = smart_resize(height, width, edge, limits["shortest_edge"], limits["longest_edge"])
        return size


class Idefics3ImageProcessor(ImageProcessor):
    """Idefics3 without tiles: every image has one size; ``pixel_values`` ``[1, 3, H, W]``."""

    placeholder = "<image>"
    before, after = "<fake_token_around_image><global-img>", "<fake_token_around_image>"
    marks = ("<image>", "<fake_token_around_image>", "<global-img>")

    def __init__(self, folder: str) -> None:
        from transformers import Idefics3Config
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        one = Idefics3ImageProcessorPil.from_pretrained(folder)  # nosec B615 # a folder
        model = Idefics3Config.from_pretrained(folder)  # nosec B615 # a folder
        if one.do_image_splitting:
            raise ConfigError(
                f"the image processor of {folder!r} cuts images into tiles: set do_image_splitting to false in its "
                "preprocessor_config.json"
            )
        vision: Any = model.vision_config
        super().__init__(one, patch_size=vision.patch_size, merge_size=model.scale_factor)

    def size(self, height: int, width: int) -> tuple[int, int]:
        edge = int(self._processor.max_image_size["longest_edge"])
        return edge, edge

    def pixels(self, png: bytes) -> dict[str, Tensor]:
        return {"pixel_values": super().pixels(png)["pixel_values"][0]}


FAMILIES: dict[str, type[QwenImageProcessor | Idefics3ImageProcessor]] = {
    "qwen2_vl": QwenImageProcessor,
    "qwen2_5_vl": QwenImageProcessor,
    "idefics3": Idefics3ImageProcessor,
}
"""Models that read images here, by ``model_type``."""


@functools.lru_cache(maxsize=8)
def load_image_processor(model_path: str) -> ImageProcessor:
    """Return the image processor of a model, by its folder or its name on the hub. ConfigError if the model is not one
    of :data:`FAMILIES`, its processor cuts images into tiles, or Pillow or preprocessor_config.json is missing."""
    if (family := stored_config(model_path).get("model_type")) is None:
        raise ConfigError(f"{model_path!r} has no config.json with a model_type: name a model's folder")
    if family not in FAMILIES:
        raise ConfigError(f"{model_path!r} is a {family} model, which reads no images here: use {', '.join(FAMILIES)}")
    try:
        return FAMILIES[family](model_path)
    except ModuleNotFoundError as error:
        raise ConfigError(f"images need Pillow ({error}): pip install 'areal-lite[vision]'") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the image processor of {model_path!r} cannot be loaded ({error}): copy the model's "
            "preprocessor_config.json beside its config.json"
        ) from error
