"""Pixels of a run's images as tensors, by digest; the latest are kept in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from areal_lite.data.vision.image_processor import ImageProcessor
from areal_lite.data.vision.image_store import ImageStore

if TYPE_CHECKING:
    from torch import Tensor

MAX_BYTES = 512 << 20


class ImagePixels:
    """Reads the images of ``store`` with a model's processor. Thread-safe; keeps at most ``max_bytes`` of tensors."""

    def __init__(self, store: ImageStore, processor: ImageProcessor, *, max_bytes: int = MAX_BYTES) -> None:
        self._store, self._processor, self._max_bytes = store, processor, max_bytes
        self._kept: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __call__(self, sha256: str) -> dict[str, Tensor]:
        """Return the model's inputs of one image; ConfigError if its file is missing or damaged."""
        with self._lock:
            if (kept := self._kept.get(sha256)) is not None:
                self._kept.move_to_end(sha256)
                return kept
        pixels = self._processor.pixels(self._store.read(sha256))
        with self._lock:
            if sha256 not in self._kept:
                self._kept[sha256] = pixels
                self._bytes += _size(pixels)
            while self._bytes > self._max_bytes and len(self._kept) > 1:
                self._bytes -= _size(self._kept.popitem(last=False)[1])
        return pixels


def _size(pixels: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in pixels.values())
