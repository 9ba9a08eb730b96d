"""The ``collate_fn`` that a dataset section names, and the rows or items of the batches that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_lite.config.dataset_config import RowsConfig
from areal_lite.config.dotted_path import load_object
from areal_lite.errors import ConfigError


def collate_fn_of(rows: RowsConfig) -> Callable[[list[Any]], Any] | None:
    """Return the function at ``rows.collate_fn``; raises ConfigError."""
    if rows.collate_fn is None:
        return None
    function = load_object(rows.collate_fn, where="collate_fn")
    if not callable(function):
        raise ConfigError(f"collate_fn is {rows.collate_fn!r}: it must be a function that takes a list of rows")
    return function  # type: ignore[no-any-return]


def rows_of_batch(batch: Any, size: int) -> list[dict[str, Any]]:
    """Return the rows of what a ``collate_fn`` made of ``size`` rows: columns as verl's makes them, or a list of dicts.

    Raises:
        ConfigError: If it is neither, or has another number of rows.
    """
    columns = batch if isinstance(batch, Mapping) else {}
    if columns and all(hasattr(column, "__len__") and len(column) == size for column in columns.values()):
        return [{name: column[place] for name, column in columns.items()} for place in range(size)]
    if not isinstance(batch, list) or len(batch) != size or not all(isinstance(row, Mapping) for row in batch):
        raise ConfigError(
            f"collate_fn made {batch!r:.200} of {size} rows: a run needs each row for its episodes, so return a dict of "
            f"columns with {size} entries each, or a list of {size} dicts, in the order of the rows"
        )
    return [dict(row) for row in batch]


def items_of_batch(batch: Any, items: list[Any]) -> list[Any]:
    """Return what a ``collate_fn`` made of the ``items`` of a supervised update; ConfigError if that cannot train."""
    keys = items[0].keys()
    if isinstance(batch, list) and batch and all(isinstance(item, Mapping) and item.keys() >= keys for item in batch):
        return batch
    raise ConfigError(
        f"collate_fn made {batch!r:.200} of {len(items)} items: the trainer packs items by itself, so return a list of "
        f"dicts with {', '.join(keys)}"
    )
