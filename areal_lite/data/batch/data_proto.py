"""A batch as named columns of equal length, with metadata.

Guarantees that tensors and object arrays stay aligned: both are indexed, repeated, split and concatenated by the same
items. `areal-lite train` builds and checks batches; the operations on them are for training loops of your own.
"""

from __future__ import annotations
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, overload
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DICTS = ("batch", "non_tensor_batch", "meta_info")
ObjectArray = NDArray[np.object_]
"""``[B]`` of dtype object: one Python value per row, of any type."""
Items = slice | Sequence[int] | Sequence[bool] | NDArray[np.integer | np.bool_] | Tensor
"""Item selection: a slice, item numbers (negative ones count from the end), or a mask ``[B]``."""


def object_array(values: Iterable[Any]) -> ObjectArray:
    """Return ``values`` as an object array of shape ``[B]``; lists of equal length stay elements."""
    return np.fromiter(values, dtype=object)


def form_of(value: Any) -> str:
    """Describe ``value`` for error messages: its type; for a tensor or array also dtype and shape."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of dtype {str(value.dtype).removeprefix('torch.')} and shape {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype} and shape {list(value.shape)}"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


@dataclass(frozen=True, slots=True, eq=False)
class DataProtoItem:
    """One item, without the batch dimension."""

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(slots=True, eq=False)
class DataProto:
    """``B`` items as named columns.

    Methods return a new object, which shares the columns if items keep their places; only :meth:`pop`, :meth:`union`
    and :meth:`reorder` work in place. ``len(batch)`` counts items; ``len(batch.batch)`` counts tensors. ValueError if
    columns differ in length or have the wrong type for their dict.
    """

    batch: dict[str, Tensor] = field(default_factory=dict)
    """Tensors ``[B, ...]``."""
    non_tensor_batch: dict[str, ObjectArray] = field(default_factory=dict)
    """Arrays ``[B]`` of dtype object, made with :func:`object_array`."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """Metadata of the whole batch; ``metrics`` is a dict of numbers that :meth:`concat` collects."""

    def __post_init__(self) -> None:
        self.check_consistency()

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Return a batch of tensors ``[B, ...]`` and numpy arrays ``[B]``, as ``collate_fn`` returns them."""
        for key, value in data.items():
            if not isinstance(value, Tensor | np.ndarray) or value.ndim == 0:
                raise ValueError(
                    f"{key!r} is {form_of(value)}: give a tensor or object_array(values); what is not one "
                    "value per item belongs in meta_info"
                )
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        return cls.from_dict(tensors, {key: data[key] for key in data if key not in tensors}, meta_info)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | NDArray[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return a batch of tensors, and of lists or arrays with one entry per item."""
        arrays = {key: object_array(values) for key, values in (non_tensors or {}).items()}
        return cls(dict(tensors or {}), arrays, dict(meta_info or {}))

    def check_consistency(self) -> None:
        """Check every column, e.g. after changing one of the dicts directly."""
        for key, tensor in self.batch.items():
            if not isinstance(tensor, Tensor) or tensor.ndim == 0:
                raise ValueError(f"batch[{key!r}] is {form_of(tensor)}: it must be a tensor [B, ...]")
            if key in self.non_tensor_batch:
                raise ValueError(f"{key!r} is in both batch and non_tensor_batch: rename one of them")
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.dtype != object or array.ndim != 1:
                raise ValueError(
                    f"non_tensor_batch[{key!r}] is {form_of(array)}: it must be an array of dtype object and "
                    "shape [B]; make it with object_array(values)"
                )
        lengths = {key: len(column) for key, column in self._columns().items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"columns differ in length, {lengths}: give each one entry per item; metadata of the whole batch "
                "belongs in meta_info"
            )

    def __len__(self) -> int:
        """Return the number of items; 0 if there are no columns."""
        return next((len(column) for column in self._columns().values()), 0)

    @overload
    def __getitem__(self, items: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, items: Items) -> DataProto: ...
    def __getitem__(self, items: int | Items) -> DataProtoItem | DataProto:
        """Return one item for an int, else the selected items in the given order; slices share storage. IndexError if
        an item does not exist or a mask has the wrong length; TypeError for neither item numbers nor a mask."""
        self.check_consistency()
        made: type[DataProtoItem] | type[DataProto] = DataProto
        index: Any
        if isinstance(items, int | np.integer):
            made = DataProtoItem
            (index,) = self._numbers([int(items)])
        elif isinstance(items, slice) and (items.step or 1) > 0:  # tensors do not support negative steps
            start, stop, step = items.indices(len(self))
            index = slice(start, stop, min(step, len(self) + 1))  # torch takes no step beyond int64
        else:
            index = self._numbers(items)
        return made(
            {key: tensor[index] for key, tensor in self.batch.items()},
            {key: array[index] for key, array in self.non_tensor_batch.items()},
            dict(self.meta_info),
        )

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:
        """Remove the named entries and return them as a batch; on an error nothing is removed."""
        popped = self._entries(batch_keys, non_tensor_batch_keys, meta_info_keys)
        for mine, removed in zip(self._dicts(), popped._dicts(), strict=True):
            for key in removed:
                del mine[key]
        return popped

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Return a batch of the named entries only; None keeps a whole dict."""
        names = (batch_keys, non_tensor_batch_keys, meta_info_keys)
        return self._entries(*(mine if keys is None else keys for mine, keys in zip(self._dicts(), names, strict=True)))

    def rename(self, names: Mapping[str, str]) -> DataProto:
        """Return the batch with columns renamed, ``{old: new}``; ValueError if two columns would get the same name."""
        columns = self._columns()
        for key in names:
            _lookup(columns, key, "the batch")
        renamed = {names.get(key, key): column for key, column in columns.items()}
        if len(renamed) < len(columns):
            raise ValueError(f"renaming {dict(names)} in {list(columns)} makes a name twice: choose another")
        return DataProto.from_single_dict(renamed, self.meta_info)

    def union(self, other: DataProto) -> Self:
        """Add ``other``'s entries in place; ValueError, and no change, if lengths or the values of a name differ."""
        merged = DataProto(*map(_merged, self._dicts(), other._dicts(), _DICTS))
        for mine, union in zip(self._dicts(), merged._dicts(), strict=True):
            mine.update(union)
        return self

    def repeat(self, repeat_times: int, *, interleave: bool = True) -> DataProto:
        """Return every item ``repeat_times`` times: ``a, a, b, b``, or ``a, b, a, b`` without ``interleave``."""
        _at_least_one("repeat_times", repeat_times)
        items = np.arange(len(self))
        return self[np.repeat(items, repeat_times) if interleave else np.tile(items, repeat_times)]

    def reorder(self, indices: Items) -> None:
        """Move item ``indices[i]`` to item ``i``, in place; ValueError unless ``indices`` has each item once."""
        numbers = self._numbers(indices)
        if not np.array_equal(np.sort(numbers), np.arange(len(self))):
            raise ValueError(
                f"the {len(numbers)} indices do not name each of {len(self)} items once: to select, index the batch"
            )
        ordered = self[numbers]
        self.batch.update(ordered.batch)
        self.non_tensor_batch.update(ordered.non_tensor_batch)

    def chunk(self, chunks: int) -> list[DataProto]:
        """Return ``chunks`` batches of equal length, which share storage with this one; ValueError if they cannot."""
        _at_least_one("chunks", chunks)
        if len(self) % chunks:
            raise ValueError(
                f"{len(self)} items cannot be cut into {chunks} equal chunks: use pad_to_divisor({chunks}) first, or "
                "split(size), whose last part may be shorter"
            )
        size = len(self) // chunks
        return [self[number * size : (number + 1) * size] for number in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Return batches of ``split_size`` items; the last may be shorter. Without items, return one empty batch."""
        _at_least_one("split_size", split_size)
        return [self[start : start + split_size] for start in range(0, max(1, len(self)), split_size)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """Return the items of all parts, in order; ValueError without parts, or if columns, shapes or metadata differ.
        Numbers in ``meta_info["metrics"]``, a dict or a list of dicts, become lists with one entry per dict (lists are
        extended). Other metadata is taken from the parts that have it."""
        if not parts:
            raise ValueError("there are no batches to concatenate: give at least one")
        first, expected = parts[0], _item_forms(parts[0])
        metrics: dict[str, list[Any]] = {}
        meta_info: dict[str, Any] = {}
        for number, part in enumerate(parts):
            actual = _item_forms(part)
            for key in expected | actual:
                if expected.get(key) != actual.get(key):
                    raise ValueError(
                        f"part {number} has {actual.get(key, 'nothing')} as {key!r}, part 0 has "
                        f"{expected.get(key, 'nothing')}: only batches with equal columns can be concatenated; pad, "
                        "pop or rename first"
                    )
            metadata = dict(part.meta_info)
            given = metadata.pop("metrics", {})
            for entry in given if isinstance(given, list) else [given]:
                if not isinstance(entry, Mapping):
                    raise ValueError(
                        f"meta_info['metrics'] of part {number} has {form_of(entry)}: give a dict of numbers by name, "
                        "or a list of such dicts"
                    )
                for name, value in entry.items():
                    metrics.setdefault(name, []).extend(value if isinstance(value, list) else [value])
            meta_info = _merged(meta_info, metadata, "meta_info")
        if metrics:
            meta_info["metrics"] = metrics
        return DataProto(
            {key: torch.cat([part.batch[key] for part in parts]) for key in first.batch},
            {key: np.concatenate([part.non_tensor_batch[key] for part in parts]) for key in first.non_tensor_batch},
            meta_info,
        )

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """Append items from the start until ``divisor`` divides the batch; return it and the number of added items. 3
        items padded to 8 are ``a, b, c, a, b, c, a, b``; :meth:`unpad` removes the added items."""
        _at_least_one("divisor", divisor)
        pad_size = -len(self) % divisor
        if not pad_size:
            return self.select(), 0
        return self[np.arange(len(self) + pad_size) % len(self)], pad_size

    def unpad(self, pad_size: int) -> DataProto:
        """Return the batch without its last ``pad_size`` items."""
        if not 0 <= pad_size <= len(self):
            raise ValueError(f"pad_size is {pad_size} of {len(self)} items: pass what pad_to_divisor returned")
        return self[: len(self) - pad_size]

    def make_iterator(self, mini_batch_size: int, *, epochs: int = 1, seed: int | None = None) -> Iterator[DataProto]:
        """Return an iterator over mini-batches, every item once per epoch. Their size must divide the batch, so items
        weigh the same in a mean. ``seed`` shuffles each epoch anew, but each run alike; None keeps the order."""
        _at_least_one("mini_batch_size", mini_batch_size)
        _at_least_one("epochs", epochs)
        if len(self) % mini_batch_size:
            raise ValueError(
                f"mini_batch_size {mini_batch_size} does not divide {len(self)} items: choose one that does, or use "
                f"pad_to_divisor({mini_batch_size}) first"
            )
        orders = (
            np.arange(len(self)) if seed is None else np.random.default_rng([seed, epoch]).permutation(len(self))
            for epoch in range(epochs)
        )
        starts = range(0, len(self), mini_batch_size)
        return (self[order[start : start + mini_batch_size]] for order in orders for start in starts)

    def to(self, device: torch.device | str) -> DataProto:
        tensors = {key: tensor.to(device) for key, tensor in self.batch.items()}
        return DataProto(tensors, dict(self.non_tensor_batch), dict(self.meta_info))

    def _columns(self) -> dict[str, Tensor | ObjectArray]:
        return {**self.batch, **self.non_tensor_batch}

    def _dicts(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return self.batch, self.non_tensor_batch, self.meta_info

    def _entries(self, *names: Iterable[str]) -> DataProto:
        return DataProto(
            *(
                {key: _lookup(mine, key, where) for key in chosen}
                for mine, chosen, where in zip(self._dicts(), names, _DICTS, strict=True)
            )
        )

    def _numbers(self, items: Items) -> NDArray[np.int64]:
        if isinstance(items, slice):
            return np.arange(len(self))[items].copy()  # torch takes no negative strides
        index = items.cpu().numpy() if isinstance(items, Tensor) else np.asarray(items)
        if index.ndim != 1 or (index.size and index.dtype.kind not in "biu"):
            raise TypeError(
                f"a batch cannot be indexed by {form_of(items)}: give a number, a slice, or a list, array or tensor "
                "of numbers or bools"
            )
        if index.dtype == bool:
            if len(index) != len(self):
                raise IndexError(f"the mask has {len(index)} entries for {len(self)} items: give one per item")
            return np.flatnonzero(index)
        outside = index[(index < -len(self)) | (index >= len(self))]
        if outside.size:
            raise IndexError(f"item {outside[0]} does not exist: the batch has {len(self)} items")
        return index.astype(np.int64) % max(1, len(self))


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}: give 1 or more")


def _lookup(values: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in values:
        raise KeyError(f"{where} has no {key!r}: it has {list(values)}")
    return values[key]


def _item_forms(part: DataProto) -> dict[str, str]:
    forms = {key: f"{tensor.dtype} items of shape {list(tensor.shape[1:])}" for key, tensor in part.batch.items()}
    return forms | dict.fromkeys(part.non_tensor_batch, "an object array")


def _merged(mine: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in mine:
        if key in theirs and not _same(mine[key], theirs[key]):
            raise ValueError(
                f"both batches have {where}[{key!r}], {form_of(mine[key])} and {form_of(theirs[key])}, with different "
                "values: pop or rename it in one of them first"
            )
    return {**mine, **theirs}


def _same(mine: Any, theirs: Any) -> bool:
    """Return True if two values are deeply equal; NaN equals NaN."""
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return False
        return bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all())
    if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray):
        return mine.shape == theirs.shape and _same(mine.tolist(), theirs.tolist())
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        return mine.keys() == theirs.keys() and all(_same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    if isinstance(mine, Tensor | np.ndarray) or isinstance(theirs, Tensor | np.ndarray):
        return False
    return bool(mine == theirs or (mine != mine and theirs != theirs))
