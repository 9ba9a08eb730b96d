"""Merges dicts of two batches, column by column; the same name with different values is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from areal_lite.data.rows.collate import form_of


def merged_dict(mine: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the entries of both."""
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
