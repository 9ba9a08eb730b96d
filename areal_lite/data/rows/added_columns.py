"""Columns that a workflow gets beside those of its row: slime's metadata, and what verl reads from ``extra_info``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from areal_lite.config.dataset_config import DatasetConfig
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
    """Return ``index``, ``tools_kwargs`` and ``interaction_kwargs`` of ``extra_info``; default 0, {} and {}.

    Warns, as verl does, if the first are needed and empty; a row's own ``need_tools_kwargs`` decides over the config's.
    """
    columns = {"index": extra.get("index") or 0, **{name: extra.get(name) or {} for name in _OF_TOOLS}}
    if not columns["tools_kwargs"] and extra.get("need_tools_kwargs", config.need_tools_kwargs):
        source = row.get("data_source") if isinstance(row, Mapping) else None
        logger.warning("tools_kwargs is empty for index %s, data source %s", columns["index"], source)
    return columns
