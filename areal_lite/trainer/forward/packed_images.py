"""Where the images of a micro-batch stand among its tokens, each image's pixels once.

Guarantees that an image is known by its recorded span alone: a placeholder token that the model sampled is text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_lite.api.image_span import ImageSpan
from areal_lite.api.trajectory import TokenSequence
from areal_lite.data.vision.image_pixels import ImagePixels
from areal_lite.errors import TrainingError
from areal_lite.models.vision_model import Pixels, VisionTower


@dataclass(frozen=True, slots=True)
class PackedImages:
    """The images of ``T`` tokens, ``I`` of which are placeholders."""

    images: list[tuple[ImageSpan, Pixels]]
    """Each different image once, with one of its spans."""
    at: Tensor
    """``[I]`` int64, index of each placeholder."""
    rows: Tensor
    """``[I]`` int64, the row of its feature among those of ``images``, one after another."""
    axes: Tensor | None
    """``[3, T]`` int64, time, row and column of every token; None if the model has plain positions."""

    @property
    def num_patches(self) -> int:
        return sum(int(np.prod(span.grid)) for span, _ in self.images)


@dataclass(slots=True)
class ImageLayout:
    """Collects the images of sequences as they are laid out."""

    tower: VisionTower | None
    position_ids: NDArray[np.int64]
    """``[T]``, complete when :meth:`packed` is called."""
    _first_rows: dict[str, int] = field(default_factory=dict)
    _spans: list[ImageSpan] = field(default_factory=list)
    _at: list[NDArray[np.int64]] = field(default_factory=list)
    _rows: list[NDArray[np.int64]] = field(default_factory=list)
    _axes: list[tuple[int, Tensor]] = field(default_factory=list)

    def add(self, sequence: TokenSequence, shared: int, end: int, begin: int) -> None:
        """Add the tokens from ``shared`` to ``end`` of a sequence, of which the first has the index ``begin``."""
        if not sequence.images:
            return
        if self.tower is None:
            raise TrainingError(
                f"task {sequence.task_id}: the sequence has images, which this model does not read: train the model "
                "that it was sampled with"
            )
        if (axes := self.tower.positions(len(sequence), sequence.images)) is not None:
            self._axes.append((begin, axes[:, shared:end]))
        for span in sequence.images:
            first, last = max(span.offset, shared), min(span.end, end)
            if first >= last:
                continue
            if span.sha256 not in self._first_rows:
                self._first_rows[span.sha256] = sum(one.length for one in self._spans)
                self._spans.append(span)
            row = self._first_rows[span.sha256] - span.offset
            self._at.append(np.arange(first, last) + begin - shared)
            self._rows.append(np.arange(first, last) + row)

    def packed(self, pixels: ImagePixels | None, device: torch.device) -> PackedImages | None:
        """Return all images; None if there are none."""
        if not self._axes and not self._spans:
            return None
        if pixels is None:
            raise TrainingError("the sequences have images, but the trainer was given no pixels: set scorer.pixels")
        axes = None
        if self._axes:
            axes = torch.from_numpy(self.position_ids).repeat(3, 1)
            for begin, part in self._axes:
                axes[:, begin : begin + part.shape[1]] = part
            axes = axes.to(device)
        at, rows = (np.concatenate([np.arange(0), *parts]) for parts in (self._at, self._rows))
        return PackedImages(
            images=[(span, pixels(span.sha256)) for span in self._spans],
            at=torch.from_numpy(at).to(device),
            rows=torch.from_numpy(rows).to(device),
            axes=axes,
        )
