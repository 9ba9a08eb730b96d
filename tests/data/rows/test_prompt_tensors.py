"""Prompts of one length: padding, truncation and positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.data.rows.rl_dataset import (
    compute_position_id_with_mask,
    pad_sequence_to_length,
    postprocess_data,
)


def processed(length, max_length, **kwargs):
    ids = torch.arange(1, length + 1)[None]
    ids, mask = postprocess_data(ids, torch.ones_like(ids), max_length, pad_token_id=0, **kwargs)
    return ids[0].tolist(), mask[0].tolist()


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, ([0, 0, 1, 2, 3], [0, 0, 1, 1, 1])),
        ({"left_pad": False}, ([1, 2, 3, 0, 0], [1, 1, 1, 0, 0])),
    ],
)
def test_a_shorter_prompt_is_padded_on_the_chosen_side(kwargs, expected):
    # V14
    assert processed(3, 5, **kwargs) == expected


@pytest.mark.parametrize("truncation", ["error", "left", "right", "middle"])
def test_a_prompt_of_the_right_length_stays(truncation):
    # V14
    assert processed(5, 5, truncation=truncation) == ([1, 2, 3, 4, 5], [1] * 5)


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [("left", [3, 4, 5, 6, 7]), ("right", [1, 2, 3, 4, 5]), ("middle", [1, 2, 5, 6, 7])],
)
def test_a_longer_prompt_is_truncated_on_the_chosen_side(truncation, kept):
    # V14
    assert processed(7, 5, truncation=truncation) == (kept, [1] * 5)


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from(["left", "right", "middle"]), st.booleans())
def test_a_prompt_gets_the_given_length_and_keeps_the_tokens_that_fit(length, max_length, truncation, left_pad):
    # V14, V-B3: also for the shortest of lengths
    ids, mask = processed(length, max_length, truncation=truncation, left_pad=left_pad)
    assert len(ids) == len(mask) == max_length
    assert sum(mask) == min(length, max_length)
    kept = [token for token, present in zip(ids, mask, strict=True) if present]
    assert kept == sorted(set(kept))


def test_error_truncation_names_both_lengths():
    # V14
    with pytest.raises(ValueError, match="7 tokens, and the maximum is 5: raise max_prompt_length"):
        processed(7, 5)


@pytest.mark.parametrize("max_length", [0, -1])
@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_a_length_below_one_is_refused(max_length, truncation):
    # V-B3
    with pytest.raises(ValueError, match=f"max_length is {max_length}: it must be 1 or more"):
        processed(3, max_length, truncation=truncation)


def test_invalid_arguments_are_refused():
    # V14
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="truncation is 'centre': it must be one of error, left, right, middle"):
        postprocess_data(ids, ids, 5, 0, truncation="centre")
    with pytest.raises(ValueError, match=r"\(3,\) and attention_mask \(3,\) must both be \[B, T\]"):
        postprocess_data(ids[0], ids[0], 5, 0)
    with pytest.raises(ValueError, match=r"\(1, 3\) and attention_mask \(1, 2\)"):
        postprocess_data(ids, ids[:, :2], 5, 0)


def test_padding_to_a_length_is_on_the_right_by_default():
    # V15
    row = torch.tensor([[1, 2]])
    assert pad_sequence_to_length(row, 4, 9).tolist() == [[1, 2, 9, 9]]
    assert pad_sequence_to_length(row, 4, 9, left_pad=True).tolist() == [[9, 9, 1, 2]]
    assert pad_sequence_to_length(row, 1, 9).tolist() == [[1, 2]]
    assert pad_sequence_to_length(torch.ones(2, 3, 1), 2, 0).shape == (2, 3, 2)


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        ([0, 0, 1, 1, 1], [0, 0, 0, 1, 2]),
        ([1, 1, 1, 1, 0, 0, 0], [0, 1, 2, 3, 3, 3, 3]),
        ([1, 0, 1], [0, 0, 1]),
        ([0, 0], [0, 0]),
    ],
)
def test_positions_count_tokens_and_right_padding_repeats_the_last(mask, positions):
    # V16, V-B1
    assert compute_position_id_with_mask(torch.tensor([mask])).tolist() == [positions]
    assert compute_position_id_with_mask(torch.tensor(mask)).tolist() == positions
