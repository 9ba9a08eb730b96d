"""Models that read images: a tower of vision with its connector, and a language decoder that reads their features.

Names are those of Qwen2-VL, Qwen2.5-VL and Idefics3; others are refused by name. Guarantees that positions come from
recorded spans alone, and tower and connector train only if asked. Knows no files: a processor made the pixels.
"""

from __future__ import annotations
from collections.abc import Mapping, Sequence
from typing import Any
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from areal_lite.api.image_span import ImageSpan
from areal_lite.data.vision.rope_positions import positions_of_spans
from areal_lite.errors import TrainingError
from areal_lite.files.model_path import check_vision_family, stored_config

Pixels = Mapping[str, Tensor]  # a model's inputs of one image, such as ``pixel_values`` and ``image_grid_thw``
TOWERS = ("model.visual.", "model.vision_model.", "model.connector.")
"""Beginnings of the names of weights that make embeddings of images."""


def auto_class_of(model_path: str) -> Any:
    """Return transformers' class that loads the language model of a folder, with its tower if it has one. Raises
    ConfigError if it reads images in a way that is not computed here."""
    reads_images = check_vision_family(stored_config(model_path), model_path)
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def text_decoder(model: Any) -> Any | None:
    """Return the decoder in a model that reads images; None for a model of text."""
    return model.get_decoder() if hasattr(model.config, "vision_config") else None


def own_name(model: Any, name: str) -> str:
    """Return the name that a stored weight has in the model: Qwen's folders have older names."""
    if not hasattr(getattr(model, "model", None), "language_model"):
        return name
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def vision_parameters(model: Any) -> dict[str, Tensor]:
    """Return the parameters of tower and connector by name; nothing of a model of text."""
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(TOWERS)}


def image_features(model: Any, images: Sequence[Pixels]) -> list[Tensor]:
    """Return the embeddings ``[tokens, hidden]`` of each image; pixels are those of its image processor."""
    inputs = {name: torch.cat([one[name] for one in images]).to(model.device) for name in images[0]}
    if "image_grid_thw" not in inputs:  # Idefics3 takes the images of each row of a batch
        inputs["pixel_values"] = inputs["pixel_values"][:, None]
    return list(model.get_image_features(**inputs, return_dict=True).pooler_output)


class VisionTower:
    """Computes what the decoder of ``model``, which reads images, needs of them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        config = model.config
        self._merge = int(getattr(config.vision_config, "spatial_merge_size", None) or config.scale_factor)
        self._has_axes = "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})
        self.num_weights = sum(parameter.numel() for parameter in vision_parameters(model).values())

    def positions(self, length: int, images: Sequence[ImageSpan]) -> Tensor | None:
        """Return ``[3, length]`` time, row and column of each token; None if the model has plain positions."""
        return positions_of_spans(length, images, merge_size=self._merge) if self._has_axes else None

    def features(self, images: Sequence[tuple[ImageSpan, Pixels]], *, one_by_one: bool = False) -> Tensor:
        """Return ``[tokens, hidden]``, image after image, with gradient only if tower or connector train. Raises
        TrainingError if an image has another number of tokens than its span."""
        pixels = [one for _, one in images]
        trains = any(parameter.requires_grad for parameter in vision_parameters(self._model).values())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
            parts = [[one] for one in pixels] if one_by_one else [pixels]
            features = [feature for part in parts for feature in image_features(self._model, part)]
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
