"""Token positions for models whose rotary embedding has three axes: time, row and column (M-RoPE).

For training loops of your own: the built-in trainer reads only text. Guarantees the positions of Qwen2-VL
(arXiv:2409.12191), Qwen2.5-VL, Qwen3-VL and GLM-4V: text counts up by one on all axes, the patches of an image or video
spread over them, and the next token starts after the longer edge of the grid. Needs only ids and grids.
"""

from __future__ import annotations

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
    """Return the positions of one sequence in the format of its model.

    The class of ``processor`` selects the rule. ``multi_modal_inputs`` may have ``image_grid_thw`` ``[N, 3]`` patches,
    ``video_grid_thw`` and, for Qwen2.5-VL, ``second_per_grid_ts`` ``[N]``.

    Args:
        input_ids: ``[T]`` int64, image and video placeholders expanded.
        attention_mask: ``[T]``, 0 at padding on either side.
        tokens_per_second: Positions per second of video, ``vision_config.tokens_per_second`` of the model's config.

    Returns:
        ``[4, T]`` int64: the plain positions, then time, row and column (0 at padding). None if the model has
        plain positions only.

    Raises:
        ValueError: If placeholders and grids disagree.
        ConfigError: If there are grids, but the processor is unknown.
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
    kinds = token_kinds(
        input_ids[present],
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        video_marks=(processor.video_start_id, processor.video_end_id) if known[0] == "Glm4vProcessor" else None,
    )
    positions = torch.zeros(4, len(input_ids), dtype=torch.int64)
    positions[0] = (present.long().cumsum(0) - 1).clamp(min=0)
    positions[1:, present] = mrope_positions(
        kinds,
        image_grids=image_grids,
        video_grids=video_grids,
        merge_size=processor.image_processor.merge_size,
        video_intervals=None if seconds is None else tokens_per_second * torch.as_tensor(seconds),
    )
    return positions


def positions_of_spans(length: int, images: Sequence[ImageSpan], *, merge_size: int) -> Tensor:
    """Return :func:`mrope_positions` ``[3, length]`` of tokens whose images are known by their spans; a placeholder
    token outside of them is text. ValueError if a span has another length than its grid."""
    kinds = torch.zeros(length, dtype=torch.int64)
    for span in images:
        kinds[span.offset : span.end] = IMAGE
    grids = torch.tensor([span.grid for span in images], dtype=torch.int64)
    return mrope_positions(kinds, image_grids=grids, video_grids=None, merge_size=merge_size)


def token_kinds(
    input_ids: Tensor, *, image_token_id: int, video_token_id: int, video_marks: tuple[int, int] | None = None
) -> Tensor:
    """Return the kind, :data:`TEXT`, :data:`IMAGE` or :data:`VIDEO`, of each of ``input_ids``, both ``[T]``.

    ``video_marks`` are the ids before and after a video whose frames use the image token.
    """
    image, video = input_ids == image_token_id, input_ids == video_token_id
    if video_marks is not None:
        start, end = ((input_ids == mark).cumsum(0) for mark in video_marks)
        video = image & (start > end)
    return torch.where(video, VIDEO, torch.where(image, IMAGE, TEXT))


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

    ``kinds`` is ``[T]``, see :func:`token_kinds`; grids are ``[N, 3]`` patches along time, height and width, of which
    ``merge_size`` along each edge make one token. ``video_intervals`` are the positions between temporal patches of
    each video, 1 by default. Returns ``[3, T]`` int64; ValueError if tokens and grids do not match.
    """
    names = {IMAGE: "image", VIDEO: "video"}
    grids: dict[int, list[list[int]]] = {
        IMAGE: [] if image_grids is None else image_grids.tolist(),
        VIDEO: [] if video_grids is None else video_grids.tolist(),
    }
    used = {IMAGE: 0, VIDEO: 0}
    pieces = [torch.zeros(3, 0, dtype=torch.int64)]
    values, counts = (run.tolist() for run in torch.unique_consecutive(kinds, return_counts=True))
    start = 0
    for kind, count in zip(values, counts, strict=True):
        if kind == TEXT:
            pieces.append(torch.arange(start, start + count).expand(3, -1))
            start += count
            continue
        while count > 0:
            index = used[kind]
            if index == len(grids[kind]):
                raise ValueError(
                    f"the sequence has more {names[kind]} tokens than its {index} {names[kind]} grids account for: "
                    "give each placeholder a grid, and keep the policy from sampling placeholder tokens"
                )
            frames, rows, columns = grids[kind][index]
            rows, columns = rows // merge_size, columns // merge_size
            if count < frames * rows * columns:
                raise ValueError(
                    f"{names[kind]} {index} has {count} tokens, but its grid {grids[kind][index]} at merge size "
                    f"{merge_size} needs {frames * rows * columns}: expand the placeholder, and do not "
                    "truncate inside it"
                )
            interval = 1.0 if kind == IMAGE or video_intervals is None else float(video_intervals[index])
            times = (torch.arange(frames) * interval).long()
            pieces.append(torch.cartesian_prod(times, torch.arange(rows), torch.arange(columns)).T + start)
            start += max(rows, columns)
            count -= frames * rows * columns
            used[kind] += 1
    for kind, index in used.items():
        if index < len(grids[kind]):
            raise ValueError(
                f"there are {len(grids[kind])} {names[kind]} grids, but the sequence has tokens for {index}: give each "
                "grid a placeholder"
            )
    return torch.cat(pieces, dim=1)
