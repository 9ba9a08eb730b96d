"""Images of prompts: stored once, and expanded to their placeholder tokens once, where a prompt becomes ids.

Guarantees that every image of a prompt is a recorded span, in order. The only place that looks for placeholders in ids:
in those of a text that a chat template has just written, whose messages name none.
"""

from __future__ import annotations
import asyncio
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from areal_lite.api.image_span import Images, ImageSpan
from areal_lite.api.io_struct import ModelRequest
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.vision.canonical_image import CanonicalImage, canonical_image
from areal_lite.data.vision.image_processor import FAMILIES, ImageProcessor, load_image_processor
from areal_lite.data.vision.image_source import base64_bytes, data_url_bytes
from areal_lite.data.vision.image_store import ImageStore
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import stored_config


class ImageEncoder:
    """Images of one model, in the store of one run. Thread-safe."""

    def __init__(self, processor: ImageProcessor, tokenizer: Any, store: ImageStore) -> None:
        self.processor = processor
        self.store = store
        place = tokenizer.convert_tokens_to_ids(processor.placeholder)
        if place is None or place == getattr(tokenizer, "unk_token_id", None):
            raise ConfigError(
                f"the tokenizer has no token {processor.placeholder!r}, which stands for an image: use the model's own"
            )
        self.placeholder_id = int(place)
        self.around = [
            list(tokenizer.encode(text, add_special_tokens=False)) if text else []
            for text in (processor.before, processor.after)
        ]

    def stored(self, source: bytes | str) -> CanonicalImage:
        """Store the canonical form of an image file or data URL; return it without bytes. ImageError, StorageError."""
        image = canonical_image(data_url_bytes(source) if isinstance(source, str) else source, self.processor)
        self.store.put(image.png)
        return image._replace(png=b"")

    def mark_in(self, text: str) -> str | None:
        """Return the first token of images that a text spells; None if it has none."""
        return next((mark for mark in self.processor.marks if mark in text), None)

    def expanded(self, ids: Sequence[int], images: Sequence[CanonicalImage]) -> tuple[list[int], Images]:
        """Return ids that have one placeholder per image with all of its tokens, and the spans of the images;
        ConfigError if there are more or fewer placeholders than images."""
        places = [index for index, token in enumerate(ids) if token == self.placeholder_id]
        if len(places) != len(images):
            raise ConfigError(
                f"the chat template writes {len(places)} placeholders {self.processor.placeholder!r} for {len(images)} "
                "images: use a template that writes one for each image part, also of tool results"
            )
        before, after = self.around
        longer: list[int] = []
        spans = []
        start = 0
        for place, image in zip(places, images, strict=True):
            longer += [*ids[start:place], *before]
            length = self.processor.num_tokens(image.grid)
            spans.append(ImageSpan(len(longer), length, image.sha256, image.grid))
            longer += [*[self.placeholder_id] * length, *after]
            start = place + 1
        return longer + list(ids[start:]), tuple(spans)

    def located(self, ids: Sequence[int], images: Sequence[CanonicalImage]) -> Images:
        """Return the spans of images in ids that a processor has expanded already, as AReaL's workflows do;
        ConfigError if the placeholders are not those of these images in order, and no more."""
        places = [index for index, token in enumerate(ids) if token == self.placeholder_id]
        lengths = [self.processor.num_tokens(image.grid) for image in images]
        runs = [places[end - n : end] for n, end in zip(lengths, itertools.accumulate(lengths), strict=True)]
        if sum(lengths) != len(places) or any(run[-1] - run[0] >= len(run) for run in runs):
            raise ConfigError(
                f"input_ids have {len(places)} placeholders of images, but image_data has {len(images)} images of "
                f"{lengths} tokens: use the model's own processor"
            )
        return tuple(
            ImageSpan(run[0], len(run), image.sha256, image.grid) for run, image in zip(runs, images, strict=True)
        )


async def with_spans(req: ModelRequest, config: InferenceEngineConfig) -> ModelRequest:
    """Return a request with the images of its ``image_data`` stored and as spans; raises ConfigError."""
    return await asyncio.to_thread(_with_spans, req, config) if req.image_data else req


def _with_spans(req: ModelRequest, config: InferenceEngineConfig) -> ModelRequest:
    path = config.tokenizer_path or str(getattr(req.tokenizer, "name_or_path", ""))
    encoder = image_encoder(path, load_tokenizer(path), config.run_dir) if path else None
    if encoder is None:
        raise ConfigError(
            f"image_data is set, and {path!r} is no model that reads images here: set rollout.tokenizer_path to a "
            f"folder of {', '.join(FAMILIES)}"
        )
    refs = [encoder.stored(base64_bytes(data.rpartition(",")[2])) for data in req.image_data or ()]
    return replace(req, images=encoder.located(req.input_ids, refs), image_data=None, processor=None)


@functools.lru_cache(maxsize=8)
def image_encoder(model_path: str, tokenizer: Any, run_dir: Path) -> ImageEncoder | None:
    """Return what encodes a model's images into a run's folder; None for a model that reads no images here."""
    if stored_config(model_path).get("model_type") not in FAMILIES:  # None for a tokenizer without its model
        return None
    return ImageEncoder(load_image_processor(model_path), tokenizer, ImageStore.of_run(run_dir))
