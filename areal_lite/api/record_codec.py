"""The record of an episode between processes: which fields cross, and plain data for those that a child sends.

A rollout worker runs users' code, so its messages are JSON, and arrays as bytes beside it, which the JSON names by
number (:mod:`areal_lite.processes.channel`). :func:`from_plain` makes the types listed here of them and nothing else.
Turns and the calls they come from do not cross: the run has made the calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import COLUMNS, EpisodeStatus, ProcessRecord, TokenSequence, Trajectory

Columns = list[bytes]
"""Arrays as bytes, in the order in which they were packed."""
ReadColumns = Sequence[bytes | bytearray]

ENDED = ("member_idx", "reward", "has_loss_mask", "failure", "sequences")
"""Fields of a trajectory, beside its status: how its episode ended."""

_FIELDS: dict[type[Any], Sequence[str]] = {
    Trajectory: ("status", *ENDED, "extras"),
    TokenSequence: ("reward", *COLUMNS),
    Failure: tuple(Failure.__dataclass_fields__),
    ProcessRecord: tuple(ProcessRecord.__dataclass_fields__),
    EpisodeStatus: ("value",),
    FailureKind: ("value",),
}
_TYPES = {cls.__name__: (cls, fields) for cls, fields in _FIELDS.items()}
_JSON = {type(None), bool, int, float, str}


def to_plain(value: Any, columns: Columns) -> Any:
    """Return ``value`` as JSON values, with its arrays added to ``columns``: a list has the kind of what it stands for
    before the content. TypeError for what no process can send."""
    kind = type(value)
    if kind in _FIELDS:
        return [kind.__name__, *_plain_parts([getattr(value, name) for name in _FIELDS[kind]], columns)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        columns.append(value.tobytes())
        return ["array", len(columns) - 1, value.dtype.str, value.shape]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", *_plain_parts(value, columns)]
    if isinstance(value, dict):
        return ["dict", *[["tuple", *_plain_parts(item, columns)] for item in value.items()]]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        columns.append(value)
        return ["bytes", len(columns) - 1]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        columns.append(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return ["tensor", len(columns) - 1, str(value.dtype).removeprefix("torch."), value.shape]
    raise TypeError(
        f"the workflow's dict holds a {kind.__name__}, which a worker cannot send: return tensors, arrays, numbers, "
        "texts, and lists and dicts of them, or set rollout.workers: 1"
    )


def _plain_parts(values: Iterable[Any], columns: Columns) -> list[Any]:
    return [value if type(value) in _JSON else to_plain(value, columns) for value in values]  # a call costs more


def from_plain(plain: Any, columns: ReadColumns) -> Any:
    """Return the value of :func:`to_plain`."""
    if not isinstance(plain, list):
        return plain
    kind, *content = plain
    if kind == "array":
        number, dtype, shape = content
        array = np.frombuffer(columns[number], dtype)
        return array if len(shape) == 1 else array.reshape(shape)
    if kind == "tensor":
        return _tensor(columns[content[0]], *content[1:])
    if kind == "bytes":
        return bytes(columns[content[0]])
    parts = [from_plain(part, columns) if isinstance(part, list) else part for part in content]
    if kind in _TYPES:
        cls, fields = _TYPES[kind]
        return cls(**dict(zip(fields, parts, strict=True)))
    return {"list": list, "tuple": tuple, "dict": dict}[kind](parts)


def _tensor(data: bytes | bytearray, name: str, shape: Sequence[int]) -> Any:
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {name}")
    return (
        torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )
