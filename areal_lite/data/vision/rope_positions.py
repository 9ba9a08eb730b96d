"""Positions of tokens for models whose rotary embedding has three axes: time, row and column (M-RoPE).

Guarantees that text counts up by one on all three axes, that the patches of an image or video spread over
them, and that what follows starts behind the longer edge of the grid, as Qwen2-VL (arXiv:2409.12191),
Qwen2.5-VL, Qwen3-VL and GLM-4V place them. Knows ids and grids; nothing of pixels or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_lite.errors import ConfigError

TEXT, IMAGE, VIDEO = 0, 1, 2
"""What a token stands for."""

_FRAMES_APART = {
    "Qwen2VLProcessor": False,
    "Qwen2_5_VLProcessor": False,
    "Qwen3VLProcessor": True,
    "Glm4vProcessor": True,
}
"""Processors of models with M-RoPE; True where a video is written frame by frame, with times between."""


def multimodal_position_ids(
    processor: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    multi_modal_inputs: Mapping[str, Tensor],
    *,
    tokens_per_second: float = 2.0,
) -> Tensor | None:
    """Return the positions of one sequence as its model wants them.

    Args:
        processor: The model's Hugging Face processor; its class says which rule holds.
        input_ids: ``[T]`` int64, image and video placeholders expanded.
        attention_mask: ``[T]`` 0 at padding, on either side.
        multi_modal_inputs: ``image_grid_thw`` ``[N, 3]`` patches, ``video_grid_thw`` and, for Qwen2.5-VL,
            ``second_per_grid_ts`` ``[N]``, as far as there are any.
        tokens_per_second: Positions in a second of video, ``vision_config.tokens_per_second`` of the model's
            config; the published Qwen2.5-VL models have 2.

    Returns:
        ``[4, T]`` int64: the plain positions, then time, row and column (0 at padding). None where the
        model's positions are plain.

    Raises:
        ValueError: If placeholders and grids disagree.
        ConfigError: If there are grids, but no rule for this processor.
    """
    known = [name for name in (kind.__name__ for kind in type(processor).__mro__) if name in _FRAMES_APART]
    image_grids, video_grids = (multi_modal_inputs.get(f"{kind}_grid_thw") for kind in ("image", "video"))
    if not known:
        if image_grids is None and video_grids is None:
            return None
        raise ConfigError(
            f"a {type(processor).__name__} gives grids, so its model places patches in three axes, but by which rule "
            f"is known for {', '.join(_FRAMES_APART)} only: use a model of these"
        )
    frames_apart = _FRAMES_APART[known[0]]
    if video_grids is not None and frames_apart:
        video_grids = video_grids.repeat_interleave(video_grids[:, 0], dim=0)
        video_grids[:, 0] = 1
    seconds = None if frames_apart else multi_modal_inputs.get("second_per_grid_ts")
    present = attention_mask.bool()
    kinds = token_kinds(
        input_ids[present],
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        video_marks=(processor.video_start_id, processor.video_end_id)
        if known[0] == "Glm4vProcessor"
        else None,
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


def token_kinds(
    input_ids: Tensor, *, image_token_id: int, video_token_id: int, video_marks: tuple[int, int] | None = None
) -> Tensor:
    """Return ``[T]`` :data:`TEXT`, :data:`IMAGE` or :data:`VIDEO` for each of ``input_ids`` ``[T]``.

    ``video_marks`` are the ids around a video where its frames are written with the image's token.
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

    Args:
        kinds: ``[T]``, see :func:`token_kinds`.
        image_grids: ``[N, 3]`` patches of each image in time, height and width.
        video_grids: The same for each video.
        merge_size: Patches that become one token along each edge.
        video_intervals: Positions from one temporal patch of a video to the next; 1 by default.

    Returns:
        ``[3, T]`` int64.

    Raises:
        ValueError: If the tokens of images or videos are not as many as the grids say.
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
                    "give each placeholder its grid, and keep the policy from sampling placeholder tokens"
                )
            frames, rows, columns = grids[kind][index]
            rows, columns = rows // merge_size, columns // merge_size
            if count < frames * rows * columns:
                raise ValueError(
                    f"{names[kind]} {index} has {count} tokens, but its grid {grids[kind][index]} at merge size "
                    f"{merge_size} says {frames * rows * columns}: expand the placeholder, and do not cut through it"
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
                f"there are {len(grids[kind])} {names[kind]} grids, but the sequence has tokens for {index}: give one "
                "placeholder each"
            )
    return torch.cat(pieces, dim=1)
