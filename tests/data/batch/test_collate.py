from __future__ import annotations
from typing import Any
import numpy as np
import pytest
import torch
from areal_lite.data.batch.collate import collate_fn
from areal_lite.data.batch.data_proto import object_array
from areal_lite.errors import ConfigError


def test_tensors_are_stacked_and_everything_else_becomes_an_object_array() -> None:
    """V17"""
    rows = [
        {"input_ids": torch.tensor([i, i]), "index": i, "extra_info": {"split": "train"}, "prompt": "hi"}
        for i in range(3)
    ]
    columns = collate_fn(rows)
    assert list(columns) == ["input_ids", "index", "extra_info", "prompt"]
    assert columns["input_ids"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert columns["index"].tolist() == [0, 1, 2]
    for key in ("index", "extra_info", "prompt"):
        assert (columns[key].dtype, columns[key].shape) == (object, (3,))
    assert columns["extra_info"][1] is rows[1]["extra_info"]


@pytest.mark.parametrize("value", [[1, 2], (1, 2), np.array([1, 2]), np.zeros((2, 2)), [[1], [2]]])
def test_lists_of_equal_length_stay_lists(value: Any) -> None:
    """V17"""
    column = collate_fn([{"x": value}, {"x": value}])["x"]
    assert (column.dtype, column.shape) == (object, (2,))
    assert column[0] is value


def test_scalar_tensors_make_a_vector() -> None:
    assert collate_fn([{"x": torch.tensor(1.5)}, {"x": torch.tensor(2.5)}])["x"].tolist() == [1.5, 2.5]


def test_a_missing_key_is_named_with_its_rows() -> None:
    """V-B6"""
    with pytest.raises(ConfigError, match=r"rows \[0, 2\] of 3 have no 'tools'.*None for missing"):
        collate_fn([{"a": 1}, {"a": 1, "tools": []}, {"a": 1}])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            torch.zeros(3),
            r"'x' is a tensor of dtype float32 and shape \[2\] in row 0 but .* shape \[3\] in row 2",
        ),
        (torch.zeros(2, dtype=torch.int64), "a tensor of dtype int64 .* in row 2: make them equal"),
        ([0.0, 0.0], "but a list in row 2"),
    ],
)
def test_tensors_of_different_shapes_are_named_with_their_rows(other: Any, message: str) -> None:
    """V-B6"""
    with pytest.raises(ConfigError, match=message):
        collate_fn([{"x": torch.zeros(2)}, {"x": torch.zeros(2)}, {"x": other}])


def test_no_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match="no rows to collate"):
        collate_fn([])


def test_an_object_array_keeps_its_values_unchanged() -> None:
    values = [[1, 2], [3, 4], None, torch.zeros(2)]
    array = object_array(values)
    assert array.shape == (4,)
    assert all(kept is value for kept, value in zip(array, values, strict=True))
    assert object_array([]).shape == (0,)
