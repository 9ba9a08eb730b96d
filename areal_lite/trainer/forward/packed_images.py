"""Where the images of a micro-batch stand among its tokens, each image's pixels once.

Guarantees that an image is known by its recorded span alone: a placeholder token that the model sampled is text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
import torch
from torch import Tensor
from areal_lite.api.image_span import ImageSpan
from areal_lite.api.trajectory import TokenSequence
from areal_lite.data.vision.image_store import ImagePixels
from areal_lite.errors import TrainingError
from areal_lite.models.vision_model import Pixels, VisionTower


@dataclass(frozen=True, slots=True)
class PackedImages:
    """The images of ``T`` tokens, ``I`` of which are placeholders."""

    images: list[tuple[ImageSpan, Pixels]]  # each different image once, with one of its spans
    at: Tensor  # ``[I]`` int64, index of each placeholder
    rows: Tensor  # ``[I]`` int64, the row of its feature among those of ``images``, one after another
    axes: Tensor | None  # ``[3, T]`` int64, time, row and column of every token; None if the model has plain positions

    def part(self, begin: int, end: int) -> "PackedImages":
        """Return the same of the tokens from ``begin`` to ``end``, with the images that stand among them, if any."""
        inside = (self.at >= begin) & (self.at < end)
        lengths = torch.tensor([span.length for span, _ in self.images], device=self.at.device)
        ends, rows = lengths.cumsum(0), self.rows[inside]
        kept, image_of = torch.unique(torch.bucketize(rows, ends, right=True), return_inverse=True)
        removed = (ends - lengths)[kept] - (lengths[kept].cumsum(0) - lengths[kept])  # rows before each image
        return PackedImages(
            images=[self.images[index] for index in kept.tolist()],
            at=self.at[inside] - begin,
            rows=rows - removed[image_of],
            axes=None if self.axes is None else self.axes[:, begin:end],
        )


Part = tuple[TokenSequence, int, int, int]  # a sequence, its first token and the end of those there, the first's index


def pack_images(
    parts: Sequence[Part], position_ids: Tensor, tower: VisionTower | None, pixels: ImagePixels | None
) -> PackedImages | None:
    """Return the images of ``parts``; None if there are none. ``position_ids [T]`` are places in sequences."""
    parts = [part for part in parts if part[0].images]
    if not parts:
        return None
    if tower is None:
        raise TrainingError(
            f"task {parts[0][0].task_id}: the sequence has images, which this model does not read: train the model "
            "that it was sampled with"
        )
    if pixels is None:
        raise TrainingError("the sequences have images, but the trainer was given no pixels: set scorer.pixels")
    images: list[tuple[ImageSpan, Pixels]] = []
    first_rows: dict[str, int] = {}
    at, rows, axes = [], [], None
    for sequence, shared, end, begin in parts:
        if (own := tower.positions(len(sequence), sequence.images)) is not None:
            axes = position_ids.repeat(3, 1) if axes is None else axes
            axes[:, begin : begin + end - shared] = own[:, shared:end].to(axes.device)
        for span in sequence.images:
            first, last = max(span.offset, shared), min(span.end, end)
            if first >= last:
                continue
            if span.sha256 not in first_rows:
                first_rows[span.sha256] = sum(one.length for one, _ in images)
                images.append((span, pixels(span.sha256)))
            at.append(torch.arange(first, last) + begin - shared)
            rows.append(torch.arange(first, last) + first_rows[span.sha256] - span.offset)
    if not images:
        return None
    device = position_ids.device
    return PackedImages(images=images, at=torch.cat(at).to(device), rows=torch.cat(rows).to(device), axes=axes)
