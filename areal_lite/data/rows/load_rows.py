"""The rows of a run, wherever they come from.

Guarantees at least one row, and that files stay on disk: a row is read when it is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from areal_lite.api.config import RowsConfig
from areal_lite.data.rows.generated_rows import GYM, generated_rows
from areal_lite.data.rows.row_files import load_dataset, looks_like_files
from areal_lite.data.rows.text_rows import Row
from areal_lite.errors import ConfigError

__all__ = ["Row", "load_rows"]


def load_rows(config: RowsConfig, *, seed: int = 1) -> Sequence[Row]:
    """Return the rows ``config`` names, at most ``max_samples``.

    Files give a ``datasets.Dataset``, which reads row ``i`` from disk at ``rows[i]``; tasks and functions a list.

    Args:
        config: Uses path, kwargs, max_samples, shuffle and cache_dir.
        seed: Chooses the rows where ``max_samples`` and ``shuffle`` are set; they keep their order.

    Raises:
        ConfigError: If they cannot be had, one is damaged, or there are none.
    """
    path = config.path
    if isinstance(path, str) and (path.startswith(GYM) or not looks_like_files(path)):
        rows: Sequence[Row] = generated_rows(path, config.kwargs)
    else:
        rows = load_dataset(path, cache_dir=config.cache_dir)
        if config.kwargs:
            raise ConfigError(f"dataset {path}: kwargs {config.kwargs} mean nothing to a file: remove them")
    if config.max_samples is None or config.max_samples >= len(rows):
        return rows
    chosen: Sequence[int] = range(config.max_samples)
    if config.shuffle:
        chosen = sorted(random.Random(seed).sample(range(len(rows)), config.max_samples))
    return select_rows(rows, chosen)


def select_rows(rows: Sequence[Row], chosen: Sequence[int]) -> Sequence[Row]:
    """Return the rows at the places ``chosen``; those of files stay on disk."""
    if isinstance(rows, list):
        return [rows[place] for place in chosen]
    return rows.select(chosen)  # type: ignore[attr-defined,no-any-return]
