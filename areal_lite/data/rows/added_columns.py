"""What a workflow gets beside a row's columns: slime's metadata, verl's ``extra_info``, what a ``collate_fn`` made."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any
from areal_lite.config.dataset_config import DatasetConfig, RowsConfig
from areal_lite.config.dotted_path import load_object
from areal_lite.data.source.sample import deep_copy
from areal_lite.errors import ConfigError

logger = logging.getLogger(__name__)
_OF_TOOLS = ("tools_kwargs", "interaction_kwargs")


def with_added(columns: dict[str, Any], row: Any, config: DatasetConfig) -> dict[str, Any]:
    """Return the workflow's input ``columns`` of ``row`` with ``metadata``, if the config names its column, and with
    :func:`tool_columns`, if ``extra_info`` has any or ``need_tools_kwargs`` asks for them; these replace no column."""
    extra = row.get("extra_info") if isinstance(row, Mapping) else None
    extra = extra if isinstance(extra, Mapping) else {}
    if config.need_tools_kwargs or any(name in extra for name in _OF_TOOLS):
        columns = {**tool_columns(extra, row, config), **columns}
    return columns if config.metadata_key is None else {**columns, "metadata": metadata_of(row, config.metadata_key)}


def metadata_of(row: Any, key: str | None) -> dict[str, Any]:
    """Return a copy of the column ``key``, empty without one; ConfigError if it is not a dict."""
    metadata = (row.get(key) or {}) if key is not None and isinstance(row, Mapping) else {}
    if not isinstance(metadata, Mapping):
        raise ConfigError(f"the column {key!r} (metadata_key) of a row is {metadata!r:.80}: it must be a dict")
    return dict(deep_copy(metadata))


def tool_columns(extra: Mapping[str, Any], row: Any, config: DatasetConfig) -> dict[str, Any]:
    """Return verl's columns of ``extra_info``; default 0, {} and {}. Warns, as verl does, if ``tools_kwargs`` is needed
    and empty; the row's own ``need_tools_kwargs`` decides over the config's."""
    columns = {"index": extra.get("index") or 0, **{name: extra.get(name) or {} for name in _OF_TOOLS}}
    if not columns["tools_kwargs"] and extra.get("need_tools_kwargs", config.need_tools_kwargs):
        source = row.get("data_source") if isinstance(row, Mapping) else None
        logger.warning("tools_kwargs is empty for index %s, data source %s", columns["index"], source)
    return columns


def collate_fn_of(rows: RowsConfig) -> Callable[[list[Any]], Any] | None:
    """Return the function that the config names; raises ConfigError."""
    function = None if rows.collate_fn is None else load_object(rows.collate_fn, where="collate_fn")
    if function is not None and not callable(function):
        raise ConfigError(f"collate_fn is {rows.collate_fn!r}: it must be a function that takes a list of rows")
    return function


def rows_of_batch(batch: Any, size: int, needs: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of what a ``collate_fn`` made of ``size`` rows: columns as verl's makes them, or a list of dicts.
    Raises ConfigError if it is neither, or a row is missing or has not what it ``needs``."""
    if isinstance(batch, Mapping) and all(getattr(column, "__len__", int)() == size for column in batch.values()):
        batch = [{name: column[place] for name, column in batch.items()} for place in range(size)]
    rows = [row for row in batch if isinstance(row, Mapping) and row.keys() >= {*needs}] if type(batch) is list else []
    if len(rows) == size == len(batch):
        return list(map(dict, rows))
    keys = f" with {', '.join(needs)}" if needs else ""
    raise ConfigError(
        f"collate_fn made {batch!r:.200} of {size} rows: each is needed by itself, so return a dict of columns with "
        f"{size} entries each, or a list of {size} dicts{keys}, in the order of the rows"
    )
