"""The rows of a run, from files, the hub, a reasoning-gym task or a function.

Guarantees at least one row, and that rows of files stay on disk and are read on access.
"""

from __future__ import annotations

import difflib
import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.config.dataset_config import RowsConfig
from areal_lite.config.dotted_path import load_object
from areal_lite.data.rows.row_files import load_dataset, looks_like_files
from areal_lite.data.rows.text_rows import Row, checked_row, kind_of
from areal_lite.errors import ConfigError

GYM = "reasoning-gym:"


def load_rows(config: RowsConfig, *, seed: int = 1) -> Sequence[Row]:
    """Return the rows that ``config`` names, at most ``max_samples``.

    Files give a ``datasets.Dataset``, which reads row ``i`` from disk at ``rows[i]``; tasks and functions give a list.
    The rows of a reasoning-gym task have the keys question, answer, metadata and task.

    Args:
        seed: Chooses the rows if ``max_samples`` and ``shuffle`` are set; they keep their order.

    Raises:
        ConfigError: If the rows cannot be loaded, one is damaged, or there are none.
    """
    path = config.path
    if isinstance(path, str) and (path.startswith(GYM) or not looks_like_files(path)):
        make = _reasoning_gym if path.startswith(GYM) else _function
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
    if isinstance(rows, list):
        return [rows[index] for index in chosen]
    return rows.select(chosen)  # type: ignore[attr-defined,no-any-return]


def _reasoning_gym(path: str, kwargs: dict[str, Any]) -> list[Row]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(f"dataset {path} needs {error.name}, not installed: pip install {error.name}") from None
    task = path.removeprefix(GYM)
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, 3)
        tasks = f"the tasks are {', '.join(sorted(DATASETS))}"
        hint = f"did you mean {' or '.join(close)}?" if close else tasks
        raise ConfigError(f"dataset {path}: reasoning-gym has no task {task!r}; {hint}")
    if "seed" not in kwargs:
        raise ConfigError(
            f"dataset {path}: kwargs has no seed, so each start would generate different rows: set "
            "kwargs: {seed: 1}, and for held-out rows a seed at least size away"
        )
    try:
        dataset = reasoning_gym.create_dataset(task, **kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"dataset {path}: kwargs {kwargs}: {error}") from None
    return [{**row, "task": task} for row in dataset]


def _function(path: str, kwargs: dict[str, Any]) -> list[Row]:
    function = load_object(path, where="dataset path")
    if not callable(function):
        raise ConfigError(f"dataset {path}: a {kind_of(function)}: it must be a function that returns rows")
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"dataset {path}: kwargs {kwargs} do not fit: {error}") from None
    rows = function(**kwargs)
    if isinstance(rows, str | Mapping) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise ConfigError(f"dataset {path}: it returned a {kind_of(rows)}: it must return a list of dicts")
    return [
        row if isinstance(row, str | list) else dict(checked_row(row, f"{path}, row {number}"))  # type: ignore[misc]
        for number, row in enumerate(rows, 1)
    ]
