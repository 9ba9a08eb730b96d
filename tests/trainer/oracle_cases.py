"""verl's outputs for given inputs, in float32 and float64: ``inputs(name)`` went in, ``case(key, field)`` came out.

Rows are right-padded ``[B, T]``; float64 agrees to 1e-9, float32 to a relative 1e-5 or an absolute 1e-6.
"""

from __future__ import annotations
import json
from functools import cache
from pathlib import Path
from typing import Any
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FOLDER = Path(__file__).parents[1] / "fixtures" / "oracle"
_FILES = {torch.float32: "oracle_s0", torch.float64: "oracle_s0_f64"}
DTYPES = tuple(_FILES)


def inputs(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return an input array: ``mask``, ``rewards_dense``, ``group`` and so on."""
    return torch.from_numpy(_arrays(dtype)[f"in/{name}"].copy())


def case(key: str, field: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return one field of one output: a tensor, or the JSON value (a number, metrics, an error's text)."""
    array = _arrays(dtype).get(f"out/{key}/{field}")
    return facts(dtype)["outputs"][key][field] if array is None else torch.from_numpy(array.copy())


def keys(prefix: str) -> list[str]:
    """Return the keys of the outputs that begin with ``prefix``, in order."""
    arrays = {name.split("/")[1] for name in _arrays(torch.float64) if name.startswith("out/")}
    return sorted(key for key in arrays | set(facts()["outputs"]) if key.startswith(prefix))


def facts(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Return the JSON beside the arrays: ``meta``, ``inputs`` and ``outputs`` that are no arrays."""
    return _json(dtype)


def assert_matches(ours: Tensor, expected: Tensor) -> None:
    """Compare within the oracle's tolerance for ``ours.dtype``, which must be that of ``expected``."""
    if ours.dtype == torch.float64:
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    else:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@cache
def _arrays(dtype: torch.dtype) -> dict[str, NDArray[Any]]:
    with np.load(_FOLDER / f"{_FILES[dtype]}.npz") as file:
        return dict(file)


@cache
def _json(dtype: torch.dtype) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((_FOLDER / f"{_FILES[dtype]}.json").read_text())
    return content
