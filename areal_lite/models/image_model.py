"""Models of transformers that read images: their decoder, and the tower that makes embeddings of an image.

Names are those of Qwen2-VL, Qwen2.5-VL and Idefics3; other models read text only here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Pixels = Mapping[str, Tensor]
"""A model's inputs of one image, such as ``pixel_values`` and ``image_grid_thw``."""
TOWERS = ("model.visual.", "model.vision_model.", "model.connector.")
"""Beginnings of the names of weights that make embeddings of images."""


def text_decoder(model: Any) -> Any | None:
    """Return the decoder in a model that reads images; None for a model of text."""
    body = getattr(model, "model", None)
    for name in ("language_model", "text_model"):
        if (decoder := getattr(body, name, None)) is not None:
            return decoder
    return None


def own_name(model: Any, name: str) -> str:
    """Return the name that a stored weight has in the model: Qwen's folders have older names."""
    if getattr(getattr(model, "model", None), "language_model", None) is None:
        return name
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def image_features(model: Any, images: Sequence[Pixels]) -> list[Tensor]:
    """Return the embeddings ``[tokens, hidden]`` of each image; pixels are those of its image processor."""
    inputs = {name: torch.cat([one[name] for one in images]).to(model.device) for name in images[0]}
    if "image_grid_thw" not in inputs:  # Idefics3 takes the images of each row of a batch
        inputs["pixel_values"] = inputs["pixel_values"][:, None]
    return list(model.get_image_features(**inputs, return_dict=True).pooler_output)
