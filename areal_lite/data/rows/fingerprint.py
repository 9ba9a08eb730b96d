"""A short hash of a dataset's content, which ties a saved position to its data.

It covers a few evenly spread values: a change between them that keeps the number of rows is not noticed.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any
import numpy as np

FINGERPRINT_ROWS = 64


def spread_positions(size: int) -> list[int]:
    """Return at most ``FINGERPRINT_ROWS`` positions below ``size``, including the first and the last."""
    last = FINGERPRINT_ROWS - 1
    return sorted({number * (size - 1) // last for number in range(FINGERPRINT_ROWS)}) if size else []


def content_hash(values: Iterable[Any]) -> str:
    """Return a hash of JSON values, arrays and tensors; of other objects, such as images, only their type counts."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(json.dumps(value, default=_as_json, skipkeys=True).encode())
    return digest.hexdigest()[:16]


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return how the values of two mappings differ, as text; empty if they are equal."""
    return "; ".join(
        f"{key} was {then.get(key)!r} and is {now.get(key)!r}"
        for key in {**then, **now}
        if then.get(key) != now.get(key)
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if not hasattr(value, "tolist"):
        return type(value).__name__
    try:
        array = np.asarray(value)
    except TypeError:  # a dtype that numpy lacks
        return value.tolist()
    if array.dtype.hasobject:
        return array.tolist()
    return [str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
