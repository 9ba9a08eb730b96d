"""Dataset rows become the columns of one batch, for training loops of your own; `areal-lite train` does not use it.

Guarantees one entry per row in every column, in order. Knows nothing about the meaning of a column.
"""

from collections.abc import Mapping, Sequence
from typing import Any
import torch
from areal_lite.data.batch.data_proto import form_of, object_array
from areal_lite.errors import ConfigError


def collate_fn(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of ``rows``, ready for :meth:`DataProto.from_single_dict`. Tensors are stacked along a new
    first dimension: two of shape ``[T]`` become ``[2, T]``. Anything else, even lists of equal length, becomes an
    :data:`ObjectArray`. ValueError without rows; ConfigError if a row lacks a key, or the tensors of one differ."""
    if not rows:
        raise ValueError("there are no rows to collate: give at least one")
    columns: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        if missing := [number for number, row in enumerate(rows) if key not in row]:
            raise ConfigError(
                f"rows {missing[:8]} of {len(rows)} have no {key!r}: give all rows the same keys (None for missing)"
            )
        values = [row[key] for row in rows]
        if not any(isinstance(value, torch.Tensor) for value in values):
            columns[key] = object_array(values)
            continue
        forms = [form_of(value) for value in values]
        if other := next((number for number, form in enumerate(forms) if form != forms[0]), 0):
            raise ConfigError(
                f"{key!r} is {forms[0]} in row 0 but {forms[other]} in row {other}: make them equal by padding or "
                ".to(dtype), or give lists, which are not stacked"
            )
        columns[key] = torch.stack(values)
    return columns
