"""The rows of a run, from files, the hub, an environment or a function.

Guarantees at least one row, and that rows of files stay on disk and are read on access.
"""

import importlib
import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from areal_lite.config.dataset_config import RowsConfig
from areal_lite.config.dotted_path import load_object
from areal_lite.data.rows.row_files import load_dataset, looks_like_files
from areal_lite.data.rows.text_rows import Row, checked_row, kind_of
from areal_lite.errors import ConfigError

_ENVIRONMENT = re.compile(r"[a-z-]+:(?!//)")


def is_environment(path: str | list[str]) -> bool:
    """Return whether ``path`` names an environment, PREFIX:NAME; its row i follows from ``seed + i`` alone."""
    return isinstance(path, str) and _ENVIRONMENT.match(path) is not None and not Path(path).exists()


def load_rows(config: RowsConfig, *, seed: int = 1) -> Sequence[Row]:
    """Return the rows that ``config`` names, at most ``max_samples``.

    Files give a ``datasets.Dataset``, which reads row ``i`` from disk at ``rows[i]``; the others give a list. Rows of a
    reasoning-gym task have the keys question, answer, metadata and task. ``seed`` chooses rows, which stay in order,
    if ``max_samples`` and ``shuffle`` are set. ConfigError if rows cannot be loaded, one is damaged, or there are none.
    """
    path = config.path
    if isinstance(path, str) and (is_environment(path) or not looks_like_files(path)):
        make = importlib.import_module("areal_lite.environments.catalog").rows if is_environment(path) else _function
        rows: Sequence[Row] = make(path, config.kwargs)
        if not rows:
            raise ConfigError(f"dataset {path}: there are no rows: give at least one")
    else:
        rows = load_dataset(path, cache_dir=config.cache_dir)
        if config.kwargs:
            raise ConfigError(f"dataset {path}: kwargs {config.kwargs} do not apply to a file: remove them")
    if config.max_samples is None or config.max_samples >= len(rows):
        return rows
    chosen: Sequence[int] = range(config.max_samples)
    if config.shuffle:
        chosen = sorted(random.Random(seed).sample(range(len(rows)), config.max_samples))
    return select_rows(rows, chosen)


def select_rows(rows: Sequence[Row], chosen: Sequence[int]) -> Sequence[Row]:
    """Return the rows at the indices ``chosen``; rows of files stay on disk."""
    select = getattr(rows, "select", None)
    return [rows[index] for index in chosen] if select is None else select(chosen)


def check_arguments(function: Callable[..., Any], kwargs: dict[str, Any], *, where: str) -> None:
    """Check that ``function`` takes the arguments; raises ConfigError."""
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{where} {kwargs} do not fit: {error}") from None


def _function(path: str, kwargs: dict[str, Any]) -> list[Row]:
    function = load_object(path, where="dataset path")
    if not callable(function):
        raise ConfigError(f"dataset {path}: a {kind_of(function)}: it must be a function that returns rows")
    check_arguments(function, kwargs, where=f"dataset {path}: kwargs")
    rows = function(**kwargs)
    if isinstance(rows, str | Mapping) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise ConfigError(f"dataset {path}: it returned a {kind_of(rows)}: it must return a list of dicts")
    return [
        row if isinstance(row, str | list) else dict(checked_row(row, f"{path}, row {number}"))  # type: ignore[misc]
        for number, row in enumerate(rows, 1)
    ]
