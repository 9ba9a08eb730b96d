from __future__ import annotations
import math
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.data.batch.collate import collate_fn
from areal_lite.data.batch.data_proto import DataProto, object_array


def numbered(size: int, **meta_info: Any) -> DataProto:
    """Items whose every column says which item it is."""
    return DataProto.from_dict(
        {"x": torch.arange(size), "wide": torch.arange(size)[:, None, None].expand(size, 2, 3).float()},
        {"item": list(range(size)), "nested": [[i, [i]] for i in range(size)]},
        meta_info,
    )


def items_of(batch: DataProto) -> list[int]:
    """Which items of :func:`numbered` these are; fails unless all columns say the same."""
    items: list[int] = batch.batch["x"].tolist()
    assert batch.batch["wide"].shape == (len(items), 2, 3)
    assert batch.batch["wide"][:, 1, 2].tolist() == items
    assert batch.non_tensor_batch["item"].tolist() == items
    assert batch.non_tensor_batch["nested"].tolist() == [[i, [i]] for i in items]
    assert len(batch) == len(items)
    return items


sizes = st.integers(0, 12)
counts = st.integers(1, 5)


def test_a_single_dict_is_split_into_tensors_and_arrays() -> None:
    """V22"""
    batch = DataProto.from_single_dict(
        collate_fn([{"ids": torch.tensor([1, 2]), "uid": "a"}, {"ids": torch.tensor([3, 4]), "uid": "b"}]),
        {"step": 3},
    )
    assert list(batch.batch) == ["ids"]
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "b"]
    assert batch.meta_info == {"step": 3}
    assert len(batch) == 2


@pytest.mark.parametrize("value", [[1, 2], "text", 3, None, np.array(3), torch.tensor(3)])
def test_a_value_that_is_neither_tensor_nor_array_is_refused(value: Any) -> None:
    """V22"""
    with pytest.raises(ValueError, match=r"'x' is an? .*: give a tensor or object_array\(values\)"):
        DataProto.from_single_dict({"x": value})


def test_lists_and_arrays_of_any_shape_have_one_entry_per_item() -> None:
    batch = DataProto.from_dict(non_tensors={"pairs": np.array([[1, 2], [3, 4]]), "lists": [[1, 2], [3, 4]]})
    assert {array.shape for array in batch.non_tensor_batch.values()} == {(2,)}
    assert batch.non_tensor_batch["pairs"][1].tolist() == [3, 4]
    assert batch.non_tensor_batch["lists"][1] == [3, 4]


@pytest.mark.parametrize(
    ("tensors", "arrays", "message"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, {}, "{'a': 2, 'b': 3}: give each one entry per item"),
        ({"a": torch.zeros(2)}, {"b": object_array([1])}, "{'a': 2, 'b': 1}"),
        ({"a": torch.tensor(1.0)}, {}, r"batch\['a'\] is a tensor of dtype float32 and shape \[\]"),
        ({"a": [1]}, {}, r"batch\['a'\] is a list: it must be a tensor"),
        ({}, {"a": np.array([1])}, "dtype int64 .* it must be an array of dtype object"),
        ({}, {"a": np.array([[1]], dtype=object)}, r"shape \[1, 1\].*make it with object_array"),
        ({"a": torch.zeros(1)}, {"a": object_array([1])}, "is in both batch and non_tensor_batch"),
    ],
)
def test_columns_that_break_the_shape_of_a_batch_are_named(tensors: Any, arrays: Any, message: str) -> None:
    """V23"""
    with pytest.raises(ValueError, match=message):
        DataProto(tensors, arrays)


def test_a_column_added_directly_is_checked_on_indexing() -> None:
    """V23"""
    batch = numbered(3)
    batch.batch["late"] = torch.zeros(5)
    with pytest.raises(ValueError, match="'late': 5"):
        batch[:2]


@given(size=sizes, data=st.data())
def test_every_kind_of_index_takes_the_same_items_on_both_sides(size: int, data: st.DataObject) -> None:
    """V27"""
    batch = numbered(size)
    numbers = data.draw(st.lists(st.integers(-size, size - 1), max_size=8) if size else st.just([]))
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    cut = data.draw(st.slices(size))
    items = list(range(size))
    for make in _INDEX_TYPES:
        assert items_of(batch[make(numbers)]) == [items[number] for number in numbers]
        if size:
            assert items_of(batch[make(mask)]) == [item for item, kept in zip(items, mask, strict=True) if kept]
    assert items_of(batch[cut]) == items[cut]


@pytest.mark.parametrize("step", [-(2**63) - 1, 2**63, -4, 4])
@pytest.mark.parametrize("size", [0, 3])
def test_a_step_beyond_the_items_selects_one_at_most(size: int, step: int) -> None:
    assert items_of(numbered(size)[::step]) == list(range(size))[::step]


_INDEX_TYPES: list[Callable[[list[Any]], Any]] = [list, tuple, np.array, torch.tensor]


@pytest.mark.parametrize("number", [1, -3, np.int64(1)])
def test_an_int_takes_one_item_without_the_batch_dimension(number: Any) -> None:
    """V27"""
    item = numbered(4, step=1)[number]
    assert (item.batch["x"].item(), item.batch["wide"].shape) == (1, (2, 3))
    assert item.non_tensor_batch == {"item": 1, "nested": [1, [1]]}
    assert item.meta_info == {"step": 1}


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (4, IndexError, "item 4 does not exist: the batch has 4 items"),
        ([0, -5], IndexError, "item -5 does not exist"),
        ([True, False], IndexError, "the mask has 2 entries for 4 items"),
        ([0.5], TypeError, "cannot be indexed by a list"),
        ([[0]], TypeError, "cannot be indexed by a list"),
        ("x", TypeError, "cannot be indexed by a str"),
    ],
)
def test_items_that_do_not_exist_are_named(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        numbered(4)[index]


def test_a_batch_is_iterated_item_by_item() -> None:
    assert [item.non_tensor_batch["item"] for item in numbered(3)] == [0, 1, 2]  # type: ignore[attr-defined]


def test_slices_share_storage_and_no_result_shares_its_dicts() -> None:
    batch = numbered(4, step=1)
    head = batch[:2]
    head.batch["x"][0] = 9
    assert batch.batch["x"][0] == 9
    for derived in (head, batch[[0]], batch.select(), batch.repeat(2), batch.to("cpu"), *batch.chunk(2)):
        derived.meta_info["step"] = 2
        derived.batch["more"] = torch.zeros(len(derived))
    assert batch.meta_info == {"step": 1}
    assert "more" not in batch.batch


@given(size=sizes, keys=st.sets(st.sampled_from(["x", "wide", "item", "nested", "step"])))
def test_popped_entries_can_be_added_back(size: int, keys: set[str]) -> None:
    """V24"""
    batch = numbered(size, step=1, lr=0.5)
    popped = batch.pop(
        [key for key in ("x", "wide") if key in keys],
        [key for key in ("item", "nested") if key in keys],
        [key for key in ("step",) if key in keys],
    )
    assert {*popped.batch, *popped.non_tensor_batch, *popped.meta_info} == keys
    assert not keys & {*batch.batch, *batch.non_tensor_batch, *batch.meta_info}
    assert batch.union(popped) is batch
    assert items_of(batch) == list(range(size))
    assert batch.meta_info == {"step": 1, "lr": 0.5}


def test_popping_a_missing_entry_names_it_and_pops_nothing() -> None:
    """V24"""
    batch = numbered(2)
    with pytest.raises(KeyError, match=r"non_tensor_batch has no 'uid': it has \['item', 'nested'\]"):
        batch.pop(["x"], ["uid"])
    assert items_of(batch) == [0, 1]


def test_items_are_repeated_side_by_side_or_as_a_whole() -> None:
    """V25"""
    assert items_of(numbered(2).repeat(repeat_times=2)) == [0, 0, 1, 1]
    assert items_of(numbered(2).repeat(2, interleave=False)) == [0, 1, 0, 1]


@given(size=sizes, times=counts)
def test_repeated_items_fold_into_groups_and_unfold_again(size: int, times: int) -> None:
    """V25, V-B18: a group's members are reached by a stride; no array is reshaped."""
    batch = numbered(size)
    every = list(range(size))
    apart, whole = batch.repeat(times), batch.repeat(times, interleave=False)
    for member in range(times):
        assert items_of(apart[member::times]) == every
        assert items_of(whole[member * size : (member + 1) * size]) == every
    if size:
        by_member = np.arange(size * times).reshape(size, times).T.ravel()
        assert items_of(apart[by_member]) == items_of(whole)


def one(value: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor([1.0])}, {"value": [value]}, {"fact": value})


@pytest.mark.parametrize(
    "value",
    [
        1,
        math.nan,
        None,
        "text",
        [1, {"a": math.nan}],
        (1, 2),
        np.array([1.0, math.nan]),
        torch.tensor([1.0, math.nan]),
        {"pixel_values": torch.ones(2, 2)},
    ],
)
def test_equal_values_may_be_shared_and_nan_is_equal_to_nan(value: Any) -> None:
    """V26"""
    copy = torch.tensor([1.0, math.nan]) if isinstance(value, torch.Tensor) else value
    mine, theirs = one(value), one(copy)
    theirs.batch["y"] = torch.tensor([2.0])
    mine.union(theirs)
    assert list(mine.batch) == ["x", "y"]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (1, 2),
        (None, 0),
        (math.nan, 0.0),
        ([1, 2], [1]),
        ([1, 2], [1, 3]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([1]), 1),
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.tensor([1.0]), torch.tensor([1])),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        (torch.tensor([1.0]), torch.tensor([math.nan])),
        (torch.tensor([1.0]), 1.0),
        (1.0, torch.tensor([1.0])),
        (np.array([1.0]), torch.tensor([1.0])),
        (1, [1]),
        ([1], 1),
        (1, {"a": 1}),
        ({"a": 1}, 1),
    ],
)
def test_a_union_with_different_values_is_an_error_and_changes_nothing(mine: Any, theirs: Any) -> None:
    """V26"""
    batch, other = one(mine), one(theirs)
    other.batch["y"] = torch.tensor([2.0])
    with pytest.raises(ValueError, match=r"both batches have non_tensor_batch\['value'\].*pop or rename it"):
        batch.union(other)
    other.pop(non_tensor_batch_keys=["value"])
    with pytest.raises(ValueError, match=r"both batches have meta_info\['fact'\]"):
        batch.union(other)
    assert list(batch.batch) == ["x"]


def test_a_union_of_unequal_lengths_is_an_error() -> None:
    """V26"""
    with pytest.raises(ValueError, match="'x': 2, 'y': 3"):
        DataProto.from_dict({"x": torch.zeros(2)}).union(DataProto.from_dict({"y": torch.zeros(3)}))


def test_tensors_with_different_values_are_named() -> None:
    """V26"""
    with pytest.raises(ValueError, match=r"both batches have batch\['x'\]"):
        DataProto.from_dict({"x": torch.zeros(2)}).union(DataProto.from_dict({"x": torch.ones(2)}))


def test_entries_are_selected_by_name() -> None:
    """V27"""
    batch = numbered(2, step=1)
    chosen = batch.select(["x"], [])
    assert (list(chosen.batch), list(chosen.non_tensor_batch), chosen.meta_info) == (["x"], [], {"step": 1})
    assert items_of(batch.select()) == [0, 1]
    with pytest.raises(KeyError, match="batch has no 'item'"):
        batch.select(["item"])


def test_columns_are_renamed_on_either_side() -> None:
    """V27"""
    batch = numbered(2, step=1)
    renamed = batch.rename({"x": "y", "item": "line"})
    assert (list(renamed.batch), list(renamed.non_tensor_batch)) == (["y", "wide"], ["line", "nested"])
    assert items_of(renamed.rename({"y": "x", "line": "item"})) == items_of(batch) == [0, 1]
    assert list(batch.rename({"x": "wide", "wide": "x"}).batch) == ["wide", "x"]
    with pytest.raises(ValueError, match="makes a name twice"):
        batch.rename({"x": "item"})
    with pytest.raises(KeyError, match="the batch has no 'z'"):
        batch.rename({"z": "x"})


@given(order=st.integers(0, 8).flatmap(lambda size: st.permutations(range(size))))
def test_reordering_works_in_place_and_the_inverse_undoes_it(order: list[int]) -> None:
    """V27"""
    batch = numbered(len(order))
    tensors = batch.batch
    batch.reorder(order)
    assert tensors is batch.batch
    assert items_of(batch) == order
    batch.reorder(torch.from_numpy(np.argsort(order)) if order else [])
    assert items_of(batch) == list(range(len(order)))
    batch.reorder([-1 - number for number in range(len(order))])
    assert items_of(batch) == list(range(len(order)))[::-1]
    batch.reorder(slice(None, None, -1))
    assert items_of(batch) == list(range(len(order)))


@pytest.mark.parametrize("indices", [[0, 1], [0, 1, 1], [0, 1, 2, 0]])
def test_an_order_that_is_not_a_permutation_is_refused(indices: list[int]) -> None:
    batch = numbered(3)
    with pytest.raises(ValueError, match="do not name each of 3 items once"):
        batch.reorder(indices)
    assert items_of(batch) == [0, 1, 2]


@given(size=st.integers(0, 4), chunks=counts)
def test_equal_chunks_concatenate_to_the_batch(size: int, chunks: int) -> None:
    """V27"""
    batch = numbered(size * chunks, step=1)
    parts = batch.chunk(chunks)
    assert [len(part) for part in parts] == [size] * chunks
    again = DataProto.concat(parts)
    assert items_of(again) == items_of(batch)
    assert again.meta_info == {"step": 1}


def test_unequal_chunks_are_refused() -> None:
    """V27"""
    with pytest.raises(ValueError, match=r"5 items cannot be cut into 2 equal chunks: use pad_to_divisor\(2\)"):
        numbered(5).chunk(2)


@given(size=sizes, part=counts)
def test_parts_of_a_size_concatenate_to_the_batch(size: int, part: int) -> None:
    """V27"""
    parts = numbered(size).split(part)
    assert all(len(one) == part for one in parts[:-1])
    assert len(parts) == max(1, math.ceil(size / part))
    assert items_of(DataProto.concat(parts)) == list(range(size))


def test_metrics_are_collected_and_other_metadata_must_agree() -> None:
    """V27"""
    parts = [numbered(1, step=1, metrics={"loss": loss}) for loss in (0.5, 0.25)]
    parts[1].meta_info["metrics"]["kl"] = 2.0
    parts[1].meta_info["late"] = True
    both = DataProto.concat(parts)
    assert both.meta_info == {"step": 1, "late": True, "metrics": {"loss": [0.5, 0.25], "kl": [2.0]}}
    more = DataProto.concat([both, numbered(1, step=1, metrics={"loss": 1.0})])
    assert more.meta_info["metrics"] == {"loss": [0.5, 0.25, 1.0], "kl": [2.0]}
    steps = [numbered(1, step=1, metrics=[{"loss": 1.0}, {"loss": 2.0, "kl": 3.0}]), numbered(1, step=1)]
    assert DataProto.concat(steps).meta_info["metrics"] == {"loss": [1.0, 2.0], "kl": [3.0]}
    with pytest.raises(ValueError, match=r"meta_info\['metrics'\] of part 1 has .*: give a dict of numbers by name"):
        DataProto.concat([numbered(1, step=1), numbered(1, step=1, metrics=[0.5])])
    with pytest.raises(ValueError, match=r"both batches have meta_info\['step'\]"):
        DataProto.concat([numbered(1, step=1), numbered(1, step=2)])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            DataProto.from_dict({"x": torch.zeros(1, 3)}),
            r"part 1 has torch.float32 items of shape \[3\] as 'x'",
        ),
        (DataProto.from_dict({"x": torch.zeros(1, 2).long()}), "part 1 has torch.int64 items"),
        (DataProto.from_dict({"y": torch.zeros(1, 2)}), "part 1 has nothing as 'x'"),
        (
            DataProto.from_dict({"x": torch.zeros(1, 2)}, {"u": [1]}),
            "an object array as 'u', part 0 has nothing",
        ),
    ],
)
def test_parts_with_other_columns_are_refused(other: DataProto, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProto.concat([DataProto.from_dict({"x": torch.zeros(1, 2)}), other])
    with pytest.raises(ValueError, match="no batches to concatenate"):
        DataProto.concat([])


@given(size=sizes, divisor=counts)
def test_padding_wraps_around_and_is_removed_again(size: int, divisor: int) -> None:
    """V27"""
    padded, pad_size = numbered(size).pad_to_divisor(divisor)
    assert len(padded) % divisor == 0
    assert pad_size < divisor
    assert items_of(padded) == [number % size for number in range(size + pad_size)]
    assert items_of(padded.unpad(pad_size)) == list(range(size))


def test_more_padding_than_items_wraps_around_again() -> None:
    """V27"""
    padded, pad_size = numbered(3).pad_to_divisor(8)
    assert (items_of(padded), pad_size) == ([0, 1, 2, 0, 1, 2, 0, 1], 5)
    with pytest.raises(ValueError, match="pad_size is 9 of 8 items"):
        padded.unpad(9)


def test_mini_batches_give_every_item_once_per_epoch_in_a_seeded_order() -> None:
    """V27"""
    batch = numbered(6)

    assert [items_of(part) for part in batch.make_iterator(2)] == [[0, 1], [2, 3], [4, 5]]

    def epochs(seed: int | None) -> list[list[int]]:
        parts = [items_of(part) for part in batch.make_iterator(2, epochs=2, seed=seed)]
        assert [len(part) for part in parts] == [2] * 6
        return [sum(parts[:3], []), sum(parts[3:], [])]

    assert epochs(None) == [[0, 1, 2, 3, 4, 5]] * 2
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    first, second = epochs(7)
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
    assert epochs(7) == [first, second] != epochs(8)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.random.get_state()[1].tolist() == numpy_state  # type: ignore[index]


def test_mini_batches_of_unequal_size_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="mini_batch_size 4 does not divide 6 items"):
        numbered(6).make_iterator(4)


@pytest.mark.parametrize(
    "call",
    [
        lambda batch: batch.repeat(0),
        lambda batch: batch.chunk(0),
        lambda batch: batch.split(0),
        lambda batch: batch.pad_to_divisor(0),
        lambda batch: batch.make_iterator(0),
        lambda batch: batch.make_iterator(1, epochs=0),
    ],
)
def test_counts_below_one_are_refused(call: Callable[[DataProto], Any]) -> None:
    with pytest.raises(ValueError, match="is 0: give 1 or more"):
        call(numbered(2))


def test_a_batch_without_columns_has_no_items() -> None:
    empty = DataProto(meta_info={"step": 1})
    assert len(empty) == 0
    assert len(empty.union(numbered(2))) == 2
    with pytest.raises(IndexError, match="item 0 does not exist"):
        DataProto()[0]


def test_tensors_move_to_a_device_and_the_rest_stays() -> None:
    """V27"""
    moved = numbered(2, step=1).to("meta")
    assert moved.batch["wide"].device.type == "meta"
    assert (moved.non_tensor_batch["item"].tolist(), moved.meta_info) == ([0, 1], {"step": 1})
