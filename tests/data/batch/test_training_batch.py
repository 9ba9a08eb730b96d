from __future__ import annotations
import gc
import math
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.api.tensor_dict import _as_numpy
from areal_lite.api.trajectory import TokenSequence
from areal_lite.data.batch.data_proto import DataProto, object_array
from areal_lite.data.batch.training_batch import check_training_batch, collate_sequences, training_sequences
from tests.trainer.episode_data import Episode, group_of, line


def sequence(tokens: int = 3, *, trained: int = 1, **changes: Any) -> TokenSequence:
    """A sequence whose last ``trained`` tokens train."""
    given = {
        "input_ids": np.arange(5, 5 + tokens),
        "loss_mask": np.arange(tokens) >= tokens - trained,
        "reward": 0.5,
        "group_id": "g",
        "task_id": "t",
    }
    return TokenSequence(**given | changes)


def batch_of(sequences: list[TokenSequence], *, spare: int = 0) -> DataProto:
    length = max(len(one.input_ids) for one in sequences) + spare
    return DataProto.from_single_dict(collate_sequences(sequences, length, pad_token_id=2))


def test_sequences_are_padded_on_the_right() -> None:
    first = sequence(
        3,
        logprobs=np.array([0, 0, -1.5], np.float32),
        versions=np.array([-1, -1, 4]),
        multi_modal_inputs={"pixel_values": torch.zeros(1)},
        token_rewards=np.array([0, 0, 2], np.float32),
        member_idx=1,
        place=((0, 2), 3),
    )
    second = sequence(2, reward=1.0, group_id="h", task_id="u")
    columns = collate_sequences([first, second], 4, pad_token_id=2)
    expected = {
        "input_ids": torch.tensor([[5, 6, 7, 2], [5, 6, 2, 2]]),
        "attention_mask": torch.tensor([[True, True, True, False], [True, True, False, False]]),
        "loss_mask": torch.tensor([[False, False, True, False], [False, True, False, False]]),
        "versions": torch.tensor([[-1, -1, 4, -1], [-1, -1, -1, -1]]),
        "rewards": torch.tensor([0.5, 1.0]),
        "logprobs": torch.tensor([[0, 0, -1.5, 0], [0, math.nan, 0, 0]]),
        "token_rewards": torch.tensor([[0, 0, 2, 0], [math.nan, math.nan, 0, 0]]),
    }
    tensors = {key: columns[key] for key in expected}
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0, equal_nan=True)
    objects = {key: columns[key].tolist() for key in columns.keys() - expected.keys()}
    assert objects == {
        "group_ids": ["g", "h"],
        "task_ids": ["t", "u"],
        "multi_modal_inputs": [first.multi_modal_inputs, None],
        "member_idx": [1, None],
        "turn_paths": [[0, 2], []],
        "turn_idx": [3, 0],
    }
    check_training_batch(DataProto.from_single_dict(columns))


def test_values_that_no_sequence_has_make_no_column() -> None:
    assert {"logprobs", "multi_modal_inputs"}.isdisjoint(collate_sequences([sequence()], 3, pad_token_id=0))


def test_a_sequence_longer_than_the_length_is_refused() -> None:
    with pytest.raises(ValueError, match="task long: computed_max_len is 4, but the longest sequence has 5 tokens"):
        collate_sequences([sequence(3), sequence(5, task_id="long")], 4, pad_token_id=0)
    with pytest.raises(ValueError, match="no sequences to collate"):
        collate_sequences([], 4, pad_token_id=0)


@st.composite
def drawn_sequences(draw: st.DrawFn) -> list[TokenSequence]:
    sequences = []
    for number in range(draw(st.integers(1, 5))):
        tokens = draw(st.integers(1, 6))
        trained = [False, *draw(st.lists(st.booleans(), min_size=tokens - 1, max_size=tokens - 1))]
        recorded, versioned = draw(st.booleans()), draw(st.booleans())
        sequences.append(
            TokenSequence(
                input_ids=np.array(draw(st.lists(st.integers(0, 9), min_size=tokens, max_size=tokens))),
                loss_mask=np.array(trained),
                logprobs=np.where(trained, -1.25, 0).astype(np.float32) if recorded else None,
                versions=np.where(trained, number, -1) if versioned else None,
                reward=draw(st.floats(-10, 10, width=32)),
                group_id=f"group-{number // 2}",
                task_id=f"task-{number}",
            )
        )
    return sequences


@settings(deadline=None)
@given(sequences=drawn_sequences(), spare=st.integers(0, 3), left=st.booleans())
def test_a_batch_reads_back_as_its_sequences(sequences: list[TokenSequence], spare: int, left: bool) -> None:
    """V64: with padding on either side."""
    batch = batch_of(sequences, spare=spare)
    if left:
        shift = batch.batch["attention_mask"].shape[1] - batch.batch["attention_mask"].sum(1)
        places = torch.arange(batch.batch["attention_mask"].shape[1])
        for key, tensor in batch.batch.items():
            if tensor.ndim == 2:
                batch.batch[key] = tensor.gather(1, (places - shift[:, None]) % len(places))
    check_training_batch(batch)
    for read, one in zip(training_sequences(batch), sequences, strict=True):
        assert read.input_ids.tolist() == one.input_ids.tolist()
        assert read.loss_mask.tolist() == one.loss_mask.tolist()
        assert (read.reward, read.group_id, read.task_id) == (one.reward, one.group_id, one.task_id)
        assert read.staleness(9) == one.staleness(9)
        if one.logprobs is not None:
            assert read.logprobs is not None
            assert read.logprobs.tolist() == one.logprobs.tolist()
        elif read.logprobs is not None:
            assert np.isnan(read.logprobs[read.loss_mask]).all()
        assert read.multi_modal_inputs is None


def test_sequences_of_groups_keep_their_turns_when_the_groups_are_gone() -> None:
    group = group_of("g", [5, 6], [Episode(line(2), 1.0)])
    expected = [(one.path, one.turn_idx) for one in group.sequences]
    sequences = training_sequences([group_of("g", [5, 6], [Episode(line(2), 1.0)])])
    gc.collect()
    assert [(one.path, one.turn_idx) for one in sequences] == expected
    assert all(path for path, _ in expected)


def test_sequences_are_views_of_the_batch() -> None:
    batch = batch_of([sequence(3), sequence(2)])
    batch.batch["logprobs"] = torch.zeros(2, 3)
    read = training_sequences(batch)[1]
    for key, array in (
        ("input_ids", read.input_ids),
        ("loss_mask", read.loss_mask),
        ("logprobs", read.logprobs),
        ("versions", read.versions),
    ):
        assert array is not None
        assert np.shares_memory(array, batch.batch[key].numpy()), key


def test_other_dtypes_of_the_same_kind_are_converted() -> None:
    batch = batch_of([sequence(3, logprobs=np.array([0, 0, -1.5], np.float32)), sequence(2)])
    plain = training_sequences(batch)
    for key, dtype in (
        ("input_ids", torch.int32),
        ("attention_mask", torch.int64),
        ("loss_mask", torch.uint8),
        ("logprobs", torch.bfloat16),
        ("versions", torch.int16),
        ("rewards", torch.float64),
    ):
        batch.batch[key] = batch.batch[key].to(dtype)
    check_training_batch(batch)
    for read, expected in zip(training_sequences(batch), plain, strict=True):
        for name in ("input_ids", "loss_mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(read, name), getattr(expected, name), strict=True)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no loss_mask": ({"loss_mask": None}, "has no 'loss_mask', so training cannot know which tokens"),
    "no rewards": ({"rewards": None}, "has no 'rewards', so training cannot know how good each sequence is"),
    "no ids": ({"input_ids": None}, "has no 'input_ids'"),
    "no group": ({"group_ids": None}, "has no 'group_ids' in non_tensor_batch: give a str per sequence"),
    "no task": ({"task_ids": None}, "has no 'task_ids'"),
    "group is int": ({"group_ids": object_array(["g", 3])}, "'group_ids' of sequence 1 is an int: it must be a str"),
    "group as tensor": ({"group_ids": torch.tensor([1, 2])}, "has no 'group_ids' in non_tensor_batch"),
    "no spans": (
        {"image_spans": object_array([[], None])},
        "'image_spans' of sequence 1 is a NoneType: it must be a list of spans, empty without images",
    ),
    "inputs of a list": (
        {"multi_modal_inputs": object_array([None, [1]])},
        "'multi_modal_inputs' of sequence 1 is a list: it must be a dict or None",
    ),
    "float ids": ({"input_ids": torch.zeros(2, 4)}, "input_ids has dtype torch.float32: it must be an integer"),
    "flat ids": ({"input_ids": torch.zeros(2).long()}, r"input_ids has shape \[2\]: it must be \[batch, seq_len\]"),
    "short mask": ({"loss_mask": torch.zeros(2, 3).bool()}, r"loss_mask has shape \[2, 3\] but input_ids has \[2, 4\]"),
    "reward per token": ({"rewards": torch.zeros(2, 4)}, r"rewards has shape \[2, 4\]: it must be \[2\]"),
    "reward nan": ({"rewards": torch.tensor([0, math.nan])}, "every reward must be finite"),
    "reward beyond float32": (
        {"rewards": torch.tensor([0, 1e39], dtype=torch.float64)},
        "every reward must be finite in float32",
    ),
    "infinite log-prob": ({"logprobs": torch.full((2, 4), -math.inf)}, "logprobs holds nan or inf at a trained token"),
    "trained padding": ({"loss_mask": torch.tensor([[0, 0, 1, 0], [0, 0, 1, 0]])}, "padding cannot be trained"),
    "trained first token": (
        {"loss_mask": torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])},
        r"sequences \[1\] of the training batch: loss_mask is True at the first token, which no token predicts",
    ),
    "trained first token after padding": (
        {
            "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
            "loss_mask": torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]]),
        },
        r"sequences \[1\] of the training batch: loss_mask is True at the first token",
    ),
    "gap": (
        {"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])},
        r"sequences \[0\] of the training batch: attention_mask has a gap between tokens",
    ),
    "lengths": ({"rewards": torch.zeros(3)}, "columns differ in length"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_batch_that_breaks_a_rule_is_rejected(name: str) -> None:
    changes, message = BROKEN[name]
    columns = collate_sequences([sequence(3), sequence(2)], 4, pad_token_id=0)
    check_training_batch(DataProto.from_single_dict(columns))
    kept = {key: value for key, value in (columns | changes).items() if value is not None}
    batch = DataProto()
    for key, value in kept.items():
        (batch.batch if isinstance(value, torch.Tensor) else batch.non_tensor_batch)[key] = value
    with pytest.raises(ValueError, match=message):
        check_training_batch(batch)


def test_a_missing_log_prob_may_be_nan() -> None:
    batch = batch_of([sequence(3, logprobs=np.array([0, 0, math.nan], np.float32)), sequence(2)])
    check_training_batch(batch)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="the training batch has no sequences"):
        check_training_batch(batch_of([sequence()])[:0])


def test_integers_on_another_device_stay_integers() -> None:
    class OnDevice:
        """Stands in for a tensor of a GPU, which this machine may lack."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

        def numpy(self) -> None:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

        def detach(self) -> OnDevice:
            return self

        def cpu(self) -> torch.Tensor:
            return self.tensor

    assert _as_numpy("input_ids", OnDevice(torch.tensor([1, 2**40]))).tolist() == [1, 2**40]
    assert _as_numpy("rewards", OnDevice(torch.tensor([0.5], dtype=torch.bfloat16))).tolist() == [0.5]
