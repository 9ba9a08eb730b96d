"""Token positions for models whose rotary embedding has three axes: time, row and column (M-RoPE).

Runs know images by their spans; loops of your own find them, and videos, in ids. Guarantees the positions of Qwen2-VL
(arXiv:2409.12191), Qwen2.5-VL, Qwen3-VL and GLM-4V: text counts up by one on all axes, the patches of an image or video
spread over them, and the next token starts after the longer edge of the grid. Needs only ids and grids.
"""

from __future__ import annotations
import math
from collections.abc import Mapping, Sequence
from typing import Any
import torch
from torch import Tensor
from areal_lite.api.image_span import ImageSpan
from areal_lite.errors import ConfigError

TEXT, IMAGE, VIDEO = 0, 1, 2
_SEPARATE_FRAMES = {
    "Qwen2VLProcessor": False,
    "Qwen2_5_VLProcessor": False,
    "Qwen3VLProcessor": True,
    "Glm4vProcessor": True,
}
"""Processors of models with M-RoPE; True if frames of a video are separated by timestamps."""


def multimodal_position_ids(
    processor: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    multi_modal_inputs: Mapping[str, Tensor],
    *,
    tokens_per_second: float = 2.0,
) -> Tensor | None:
    """Return the positions of one sequence ``[4, T]`` int64: the plain ones, then time, row and column (0 at padding).
    None if all are plain. ValueError if placeholders and grids disagree; ConfigError for grids of an unknown processor.

    The class of ``processor`` selects the rule. ``input_ids`` ``[T]`` have all placeholders; ``attention_mask`` ``[T]``
    is 0 at padding on either side. ``multi_modal_inputs`` may have ``image_grid_thw`` ``[N, 3]`` patches,
    ``video_grid_thw`` and, for Qwen2.5-VL, ``second_per_grid_ts`` ``[N]``, at the ``tokens_per_second`` of its config.
    """
    known = [name for name in (kind.__name__ for kind in type(processor).__mro__) if name in _SEPARATE_FRAMES]
    image_grids, video_grids = (multi_modal_inputs.get(f"{kind}_grid_thw") for kind in ("image", "video"))
    if not known:
        if image_grids is None and video_grids is None:
            return None
        raise ConfigError(
            f"{type(processor).__name__} gives grids, so its model uses M-RoPE, but the rule is known only for "
            f"{', '.join(_SEPARATE_FRAMES)}: use one of their models"
        )
    separate_frames = _SEPARATE_FRAMES[known[0]]
    if video_grids is not None and separate_frames:
        video_grids = video_grids.repeat_interleave(video_grids[:, 0], dim=0)
        video_grids[:, 0] = 1
    seconds = None if separate_frames else multi_modal_inputs.get("second_per_grid_ts")
    present = attention_mask.bool()
    ids = input_ids[present]
    is_image, is_video = ids == processor.image_token_id, ids == processor.video_token_id
    if known[0] == "Glm4vProcessor":  # whose videos use the image token, between marks
        start, end = ((ids == mark).cumsum(0) for mark in (processor.video_start_id, processor.video_end_id))
        is_video = is_image & (start > end)
    positions = torch.zeros(4, len(input_ids), dtype=torch.int64)
    positions[0] = (present.long().cumsum(0) - 1).clamp(min=0)
    positions[1:, present] = mrope_positions(
        torch.where(is_video, VIDEO, torch.where(is_image, IMAGE, TEXT)),
        image_grids=image_grids,
        video_grids=video_grids,
        merge_size=processor.image_processor.merge_size,
        video_intervals=None if seconds is None else tokens_per_second * torch.as_tensor(seconds),
    )
    return positions


def positions_of_spans(length: int, images: Sequence[ImageSpan], *, merge_size: int) -> Tensor:
    """Return time, row and column ``[3, length]`` of tokens whose images are known by their spans; a placeholder token
    outside of them is text. ValueError if a span has another length than its grid."""
    for number, span in enumerate(images):
        if (needed := math.prod(span.grid) // merge_size**2) != span.length:
            raise ValueError(f"image {number} has {span.length} tokens, but its grid {list(span.grid)} needs {needed}")
    return _positions(length, [(span.offset, span.grid, 1.0) for span in images], merge_size)


def mrope_positions(
    kinds: Tensor,
    *,
    image_grids: Tensor | None,
    video_grids: Tensor | None,
    merge_size: int,
    video_intervals: Tensor | Sequence[float] | None = None,
) -> Tensor:
    """Return time, row and column of each token of one unpadded sequence.

    Two text tokens, an image of ``[1, 4, 6]`` patches at merge size 2, one text token::

        time    0 1  2 2 2 2 2 2  5
        row     0 1  2 2 2 3 3 3  5
        column  0 1  2 3 4 2 3 4  5

    ``kinds`` is ``[T]``, each :data:`TEXT`, :data:`IMAGE` or :data:`VIDEO`; grids are ``[N, 3]`` patches along time,
    height and width, of which ``merge_size`` along each edge make one token. ``video_intervals`` are the positions
    between temporal patches of each video, 1 by default. Returns ``[3, T]`` int64; ValueError if grids do not fit.
    """
    media: list[tuple[int, Sequence[int], float]] = []
    for kind, name, grids in ((IMAGE, "image", image_grids), (VIDEO, "video", video_grids)):
        places = (kinds == kind).nonzero()[:, 0].tolist()
        for index, grid in enumerate([] if grids is None else grids.tolist()):
            needed = math.prod(grid) // merge_size**2
            here, places = places[:needed], places[needed:]
            if (count := sum(place == here[0] + n for n, place in enumerate(here))) < needed:
                raise ValueError(
                    f"{name} {index} has {count} tokens, but its grid {grid} at merge size {merge_size} needs {needed}"
                    ": give each grid an expanded placeholder, and do not truncate inside it"
                )
            interval = 1.0 if kind == IMAGE or video_intervals is None else float(video_intervals[index])
            media.append((here[0], grid, interval))
        if places:
            raise ValueError(
                f"the sequence has {len(places)} more {name} tokens than its {name} grids account for: give each "
                "placeholder a grid, and keep the policy from sampling placeholder tokens"
            )
    return _positions(len(kinds), sorted(media), merge_size)


def _positions(length: int, media: Sequence[tuple[int, Sequence[int], float]], merge_size: int) -> Tensor:
    """Return the positions ``[3, length]`` of text and of ``media``: first token, grid, positions between patches."""
    pieces, end, start = [], 0, 0  # of the tokens so far; the next position
    for offset, (frames, *edges), interval in media:
        rows, columns = (edge // merge_size for edge in edges)
        pieces.append(torch.arange(start, start := start + offset - end).expand(3, -1))
        times = (torch.arange(frames) * interval).long()
        pieces.append(torch.cartesian_prod(times, torch.arange(rows), torch.arange(columns)).T + start)
        start, end = start + max(rows, columns), offset + frames * rows * columns
    return torch.cat([*pieces, torch.arange(start, start + length - end).expand(3, -1)], dim=1)
