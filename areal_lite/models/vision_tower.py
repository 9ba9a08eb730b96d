"""Models that read images: a tower of vision with its connector, and a language decoder that reads their features.

Guarantees that a model whose images see one another out of order, or that is unknown here, is refused by name; that
positions come from recorded spans alone; and that tower and connector train only if asked to. Knows no files: pixels
are what an image processor made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from areal_lite.api.image_span import ImageSpan
from areal_lite.data.vision.rope_positions import positions_of_spans
from areal_lite.errors import TrainingError
from areal_lite.files.model_path import check_vision_family
from areal_lite.models.image_model import Pixels, image_features


def auto_class_of(model_path: str) -> Any:
    """Return transformers' class that loads the language model of a folder, with its tower if it has one.

    Raises:
        ConfigError: If it reads images in a way that is not computed here.
    """
    try:
        config, _ = PretrainedConfig.get_config_dict(model_path)
    except (OSError, ValueError):
        return AutoModelForCausalLM  # loading it gives the reason
    return AutoModelForImageTextToText if check_vision_family(config, model_path) else AutoModelForCausalLM


def vision_parameters(model: Any) -> dict[str, Tensor]:
    """Return the parameters of tower and connector by name; nothing of a model of text."""
    if not hasattr(getattr(model, "config", None), "vision_config"):
        return {}
    language = {id(p) for part in (model.get_decoder(), model.get_output_embeddings()) for p in part.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in language}


def frozen_vision(model: Any) -> set[str]:
    """Return the names of weights that no update changes because they are of a frozen tower or connector."""
    return {name for name, parameter in vision_parameters(model).items() if not parameter.requires_grad}


class VisionTower:
    """Computes what the decoder of ``model`` needs of images."""

    def __init__(self, model: Any) -> None:
        self._model = model
        config = model.config
        self._merge = int(getattr(config.vision_config, "spatial_merge_size", None) or config.scale_factor)
        self._has_axes = "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})
        self.num_weights = sum(parameter.numel() for parameter in vision_parameters(model).values())

    @classmethod
    def of(cls, model: Any) -> VisionTower | None:
        return cls(model) if hasattr(model.config, "vision_config") else None

    @property
    def trains(self) -> bool:
        return any(parameter.requires_grad for parameter in vision_parameters(self._model).values())

    def positions(self, length: int, images: Sequence[ImageSpan]) -> Tensor | None:
        """Return ``[3, length]`` time, row and column of each token; None if the model has plain positions."""
        return positions_of_spans(length, images, merge_size=self._merge) if self._has_axes else None

    def features(self, images: Sequence[tuple[ImageSpan, Pixels]], *, one_by_one: bool = False) -> Tensor:
        """Return ``[tokens, hidden]``, image after image, with gradient only if tower or connector train.

        Raises:
            TrainingError: If an image has another number of tokens than its span.
        """
        parts = [[image] for image in images] if one_by_one else [images]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains):
            features = [
                feature for part in parts for feature in image_features(self._model, [pixels for _, pixels in part])
            ]
        for (span, _), feature in zip(images, features, strict=True):
            if len(feature) != span.length:
                raise TrainingError(
                    f"the image {span.sha256[:12]} has {span.length} tokens in its sequence, and the "
                    f"{type(self._model).__name__} makes {len(feature)} of it: use the image processor "
                    "that it was sampled with"
                )
        return torch.cat(features)

    def smallest(self) -> tuple[ImageSpan, Pixels]:
        """Return a grey image of one token, for a rank without images: its tower computes with those of the others."""
        config, edge = self._model.config.vision_config, self._merge
        span = ImageSpan(0, 1, "", (1, edge, edge))
        if not hasattr(config, "temporal_patch_size"):
            return span, {"pixel_values": torch.ones(1, 3, *[edge * config.patch_size] * 2)}
        values = 3 * config.temporal_patch_size * config.patch_size**2
        return span, {"pixel_values": torch.ones(edge**2, values), "image_grid_thw": torch.tensor([span.grid])}
