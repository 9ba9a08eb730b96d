"""Prompt tensors of one length: padding, truncation, positions.

For training loops of your own; `areal-lite train` does not use it. Guarantees the shapes.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_lite.data.chat.prompt_encoder import kept_ends

Truncation = Literal["error", "left", "right", "middle"]


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Truncation = "error",
) -> tuple[Tensor, Tensor]:
    """Return ids and mask padded or truncated to ``max_length``.

    Args:
        input_ids: ``[B, T]`` int64.
        attention_mask: ``[B, T]``, 0 at padding.
        max_length: Length of the result, 1 or more.
        pad_token_id: Fills ids; the mask is filled with 0.
        left_pad: Pad before the prompt, so its last token stays last.
        truncation: For longer prompts, left keeps the last tokens, right the first ones, and middle the first
            ``max_length // 2`` plus the last ones.

    Returns:
        Two tensors ``[B, max_length]``.

    Raises:
        ValueError: If a prompt is longer and ``truncation`` is error, or an argument is invalid.
    """
    if truncation not in get_args(Truncation):
        raise ValueError(f"truncation is {truncation!r}: it must be one of {', '.join(get_args(Truncation))}")
    if input_ids.ndim != 2 or input_ids.shape != attention_mask.shape:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)} must both be [B, T]"
        )
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}: it must be 1 or more")
    length = input_ids.shape[1]
    if length <= max_length:
        return (
            pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
            pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
        )
    head, tail = kept_ends(length, max_length, truncation)
    return (
        torch.cat([input_ids[:, :head], input_ids[:, length - tail :]], dim=1),
        torch.cat([attention_mask[:, :head], attention_mask[:, length - tail :]], dim=1),
    )


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Tensor:
    """Return ``tensors`` with the last dimension padded to ``max_seq_len``; longer ones are unchanged."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return positions ``[..., T]`` that count the tokens of a mask ``[..., T]`` from 0.

    Padding before the tokens has position 0; padding after them repeats the last position:
    ``[0, 0, 1, 1]`` gives ``[0, 0, 0, 1]`` and ``[1, 1, 0, 0]`` gives ``[0, 1, 1, 1]``.
    """
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)
