from __future__ import annotations
import math
import os
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from areal_lite.data.batch.data_proto import DataProto, object_array
from areal_lite.data.batch.data_proto_file import load_data_proto, save_data_proto
from areal_lite.errors import ConfigError, StorageError


def assert_same(found: Any, expected: Any) -> None:
    """Fail unless types and values agree all the way down; NaN is equal to NaN."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(_bytes(found), _bytes(expected))
    elif isinstance(expected, np.ndarray) and expected.dtype != object:
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple | np.ndarray):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected or (found != found and expected != expected)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def read_back(batch: DataProto, folder: Path) -> DataProto:
    return load_data_proto(save_data_proto(batch, folder / "batch.safetensors"))


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.sampled_from(["$", "nan"]),
    st.builds(lambda shape: torch.full(shape, math.nan), st.sampled_from([(), (2,), (0, 3)])),
    st.builds(lambda shape: np.ones(shape, np.int16), st.sampled_from([(), (2,), (0, 3)])),
)
keys = st.one_of(st.text(st.characters(codec="utf-8"), max_size=3), st.just("$"), st.integers(0, 9))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=8,
)


EVERY_KIND = [
    None,
    True,
    1,
    1.0,
    math.nan,
    -math.inf,
    "ü",
    [[1], (2.0, [])],
    {"$": 1, 2: {}},
    {"a": np.ones(2)},
]


@settings(max_examples=100, deadline=None)
@example(column=EVERY_KIND, facts={"every": EVERY_KIND})
@given(
    column=st.lists(values, max_size=4),
    facts=st.dictionaries(st.text("ab$ü", max_size=3), values, max_size=3),
)
def test_a_batch_reads_back_equal(
    column: list[Any], facts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """V27"""
    batch = DataProto.from_dict({"b": torch.zeros(len(column), 2)}, {"a": column}, facts)
    again = read_back(batch, tmp_path_factory.getbasetemp())
    assert_same(again.batch, batch.batch)
    assert_same(again.non_tensor_batch, batch.non_tensor_batch)
    assert_same(again.meta_info, batch.meta_info)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ],
)
@pytest.mark.parametrize("shape", [(3,), (3, 2), (0, 4), (3, 0), (0,)])
def test_tensors_keep_dtype_shape_and_every_bit(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    """V27"""
    torch.manual_seed(0)
    tensor = torch.randn(shape).mul(3).to(dtype)
    if dtype.is_floating_point and tensor.numel():
        tensor.view(-1)[:2] = torch.tensor([math.nan, -0.0])
    assert_same(read_back(DataProto({"x": tensor}), tmp_path).batch["x"], tensor)


def test_views_of_one_tensor_are_written_with_their_own_values(tmp_path: Path) -> None:
    """V27"""
    whole = torch.arange(12.0, requires_grad=True).reshape(4, 3)
    batch = DataProto({"whole": whole, "same": whole, "part": whole[:, 1:], "every": whole[0].expand(4, 3)})[1:3]
    again = read_back(batch, tmp_path)
    assert_same(again.batch, {key: tensor.detach() for key, tensor in batch.batch.items()})


def test_numpy_numbers_become_python_numbers(tmp_path: Path) -> None:
    """V-B10"""
    numbers = [np.float32(0.1), np.int64(3), np.bool_(True), np.float64(0.1)]
    again = read_back(DataProto.from_dict(non_tensors={"x": numbers}), tmp_path)
    assert_same(again.non_tensor_batch["x"].tolist(), [float(np.float32(0.1)), 3, True, 0.1])


def test_a_read_batch_can_be_changed_and_its_file_stays(tmp_path: Path) -> None:
    path = save_data_proto(
        DataProto({"x": torch.zeros(2)}, {"pixels": object_array([np.zeros(2)] * 2)}), tmp_path / "b"
    )
    changed = load_data_proto(path)
    changed.batch["x"] += 1
    changed.non_tensor_batch["pixels"][0][0] = 1
    assert load_data_proto(path).batch["x"].tolist() == [0, 0]


class Reduced:
    """Runs code if it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Reduced(), "it contains a Reduced; use numbers"),
        ({"a": [Reduced()]}, "it contains a Reduced"),
        ({1, 2}, "it contains a set"),
        (b"bytes", "it contains a bytes"),
        (2**70, "64-bit"),
        ("\ud800", "UTF-8"),
        (np.array(["text"]), "can't convert np.ndarray"),
        (np.array([Reduced()]), "can't convert np.ndarray"),
    ],
)
def test_a_value_that_needs_pickle_is_refused_by_key_and_nothing_is_written(
    value: Any, message: str, tmp_path: Path
) -> None:
    """V-B11"""
    for batch, place in (
        (DataProto.from_dict(non_tensors={"images": [value]}), "non_tensor_batch"),
        (DataProto(meta_info={"images": value}), "meta_info"),
    ):
        with pytest.raises(ValueError, match=rf"{place}\['images'\] cannot be stored without pickle: .*{message}"):
            save_data_proto(batch, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_an_unsupported_dtype_is_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\['batch/x'\] have dtype torch.complex128"):
        save_data_proto(DataProto({"x": torch.zeros(2, dtype=torch.complex128)}), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_any_reader_of_safetensors_finds_the_tensors(tmp_path: Path) -> None:
    """V-B11: no pickle anywhere in the file."""
    batch = DataProto({"x": torch.ones(2)}, {"mm": object_array([{"pixels": torch.zeros(3)}, None])})
    with safe_open(save_data_proto(batch, tmp_path / "b"), framework="pt") as file:
        assert sorted(file.keys()) == ["batch/x", "json", "non_tensor_batch/mm/1"]
        assert file.get_tensor("batch/x").tolist() == [1, 1]


def test_a_batch_replaces_the_previous_one_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "b"
    for step in range(2):
        save_data_proto(DataProto(meta_info={"step": step}), path)
    assert load_data_proto(path).meta_info == {"step": 1}
    assert [file.name for file in path.parent.iterdir()] == ["b"]


def test_a_file_is_readable_by_others(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        path = save_data_proto(DataProto(), tmp_path / "b")
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_columns_of_unequal_length_are_not_saved(tmp_path: Path) -> None:
    batch = DataProto({"x": torch.zeros(2)})
    batch.batch["late"] = torch.zeros(3)
    with pytest.raises(ValueError, match="'late': 3"):
        save_data_proto(batch, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_data_proto(DataProto(meta_info={"step": 0}), tmp_path / "b")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(StorageError, match="No space left on device: free disk space"):
        save_data_proto(DataProto(meta_info={"step": 1}), path)
    assert load_data_proto(path).meta_info == {"step": 0}
    assert list(tmp_path.iterdir()) == [path]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = save_data_proto(DataProto({"x": torch.ones(4)}, meta_info={"step": 0}), tmp_path / "b")
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="no batch can be read from .*b .*it must be a complete file"):
            load_data_proto(path)


def test_files_of_other_programs_are_refused(tmp_path: Path) -> None:
    tensors = {"x": torch.ones(1)}
    save_file(tensors, tmp_path / "model")
    with pytest.raises(ConfigError, match="model does not hold a batch"):
        load_data_proto(tmp_path / "model")
    save_file(tensors, tmp_path / "later", metadata={"format": "areal_lite.DataProto", "schema": "2"})
    with pytest.raises(ConfigError, match="later has schema 2, but this version reads 1"):
        load_data_proto(tmp_path / "later")
    (tmp_path / "data.pt").write_text("no tensors at all")
    for path in (tmp_path / "data.pt", tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=f"no batch can be read from {path}"):
            load_data_proto(path)
