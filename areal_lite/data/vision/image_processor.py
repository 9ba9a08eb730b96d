"""Image processors of the models that read images, made from a model's folder with Pillow alone.

Guarantees that the pixels of a canonical image are equal to the bit at every call, whoever makes it: the engine's
server, the trainer and proofs. Only the models of :data:`FAMILIES`, and processors that do not cut an image into tiles.
"""

from __future__ import annotations

import functools
import io
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lite.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Grid = tuple[int, int, int]


class ImageProcessor(ABC):
    """How one model turns an image into pixels and tokens."""

    placeholder: str
    """The token that a chat template writes for an image."""
    before = after = ""
    """Text that belongs around the placeholders of an image and that no chat template writes."""
    marks: tuple[str, ...]
    """Tokens that only images have; a text that has one is refused."""
    merge_size: int | None = None
    """Patches along the edge of a token, for models that place it by time, row and column; None for plain positions."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    @property
    def settings(self) -> str:
        """All that decides its pixels and grids, as JSON."""
        return str(self._processor.to_json_string())

    @property
    def resample(self) -> Any:
        """Pillow's filter for resizing."""
        return self._processor.resample

    @abstractmethod
    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to; ValueError if it cannot be."""

    @abstractmethod
    def grid(self, height: int, width: int) -> Grid:
        """Return the patches of a resized image along time, height and width."""

    @abstractmethod
    def num_tokens(self, grid: Grid) -> int:
        """Return the number of placeholder tokens of an image."""

    def pixels(self, png: bytes) -> dict[str, Tensor]:
        """Return the model's inputs of one canonical image, such as ``pixel_values`` and ``image_grid_thw``."""
        from PIL import Image

        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            return self._tensors(image.convert("RGB"))

    def _tensors(self, image: Image) -> dict[str, Tensor]:
        return dict(self._processor(image, do_resize=False, return_tensors="pt"))


class QwenImageProcessor(ImageProcessor):
    """Qwen2-VL and Qwen2.5-VL: any size in patches, ``merge_size ** 2`` of which make a token.

    ``pixels`` are ``pixel_values`` ``[patches, values]`` and ``image_grid_thw`` ``[1, 3]``.
    """

    placeholder = "<|image_pad|>"
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")

    def __init__(self, processor: Any) -> None:
        super().__init__(processor)
        self.merge_size: int = processor.merge_size

    def size(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        one = self._processor
        limits = {"min_pixels": one.size["shortest_edge"], "max_pixels": one.size["longest_edge"]}
        size: tuple[int, int] = smart_resize(height, width, one.patch_size * self.merge_size, **limits)
        return size

    def grid(self, height: int, width: int) -> Grid:
        return 1, height // self._processor.patch_size, width // self._processor.patch_size

    def num_tokens(self, grid: Grid) -> int:
        time, height, width = grid
        return time * height * width // self.merge_size**2


class Idefics3ImageProcessor(ImageProcessor):
    """Idefics3 without tiles: every image has one size. ``pixels`` are ``pixel_values`` ``[1, 3, H, W]``."""

    placeholder = "<image>"
    before, after = "<fake_token_around_image><global-img>", "<fake_token_around_image>"
    marks = ("<image>", "<fake_token_around_image>", "<global-img>")

    def __init__(self, processor: Any, patch_size: int, scale_factor: int) -> None:
        super().__init__(processor)
        self._patch_size, self._scale_factor = patch_size, scale_factor

    def size(self, height: int, width: int) -> tuple[int, int]:
        edge = int(self._processor.max_image_size["longest_edge"])
        return edge, edge

    def grid(self, height: int, width: int) -> Grid:
        return 1, height // self._patch_size, width // self._patch_size

    def num_tokens(self, grid: Grid) -> int:
        return grid[1] * grid[2] // self._scale_factor**2

    def _tensors(self, image: Image) -> dict[str, Tensor]:
        return {"pixel_values": super()._tensors(image)["pixel_values"][0]}


def _qwen(folder: str, config: dict[str, Any]) -> ImageProcessor:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return QwenImageProcessor(Qwen2VLImageProcessorPil.from_pretrained(folder))


def _idefics3(folder: str, config: dict[str, Any]) -> ImageProcessor:
    from transformers import Idefics3Config
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    processor = Idefics3ImageProcessorPil.from_pretrained(folder)
    if processor.do_image_splitting:
        raise ConfigError(
            f"the image processor of {folder!r} cuts images into tiles: set do_image_splitting to false in its "
            "preprocessor_config.json"
        )
    model: Any = Idefics3Config.from_dict(config)
    return Idefics3ImageProcessor(processor, model.vision_config.patch_size, model.scale_factor)


FAMILIES = {"qwen2_vl": _qwen, "qwen2_5_vl": _qwen, "idefics3": _idefics3}
"""Models that read images here, by ``model_type``."""


@functools.lru_cache(maxsize=8)
def load_image_processor(model_path: str) -> ImageProcessor:
    """Return the image processor of the model in a folder.

    Raises:
        ConfigError: If the model is not one of :data:`FAMILIES`, its processor cuts images into tiles, or Pillow or the
            folder's preprocessor_config.json is missing.
    """
    try:
        config = json.loads((Path(model_path).expanduser() / "config.json").read_bytes())
        family = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model_path!r} has no config.json with a model_type ({error}): name a model's folder"
        ) from None
    if family not in FAMILIES:
        raise ConfigError(f"{model_path!r} is a {family} model, which reads no images here: use {', '.join(FAMILIES)}")
    try:
        return FAMILIES[family](model_path, config)
    except ModuleNotFoundError as error:
        raise ConfigError(f"images need Pillow ({error}): pip install 'areal-lite[vision]'") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the image processor of {model_path!r} cannot be loaded ({error}): copy the model's "
            "preprocessor_config.json beside its config.json"
        ) from error
