"""A batch in one file, without pickle: reading it runs no code; and a cache of batches, reused by later runs.

Guarantees that the file is written atomically and that a batch reads back equal. Tensors and numeric arrays, also
nested ones, are safetensors, those of a batch named ``batch/NAME``; the rest is JSON in a tensor of bytes.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
import numpy as np
import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from areal_lite.data.batch.data_proto import DataProto, form_of, object_array
from areal_lite.data.rows.fingerprint import differences
from areal_lite.errors import ConfigError
from areal_lite.files.whole_files import storing, write_whole

_FORMAT = "areal_lite.DataProto"
_SCHEMA = "1"
_JSON = "json"
_KIND = "$"  # ``{"$": kind, "value": ...}`` stands for a value that JSON cannot express
_MADE_UNDER = "cached_batch_made_under"


def save_data_proto(batch: DataProto, path: Path | str) -> Path:
    """Write ``batch`` to the file ``path``, replacing an existing one, and return the path. Gradients and devices are
    not stored; numpy scalars become Python numbers. ValueError, with its key, if a value cannot be stored without
    pickle; StorageError if the disk is full or not writable."""
    tensors = to_tensors(batch)
    path = Path(path)
    try:
        content = save(tensors, {"format": _FORMAT, "schema": _SCHEMA})
    except KeyError as error:  # a dtype that safetensors does not support
        names = [name for name, tensor in tensors.items() if tensor.dtype in error.args]
        raise ValueError(f"{names} have dtype {error}, which safetensors lacks: convert them") from error
    with storing(f"the batch {path}", "free disk space or fix its permissions"):
        write_whole(path, content)
    return path


def load_data_proto(path: Path | str) -> DataProto:
    """Return the batch of :func:`save_data_proto`, on the CPU; ConfigError for a missing, broken or newer file."""
    try:
        with safe_open(path, framework="pt") as file:
            mark = file.metadata() or {}
            if mark.get("format") != _FORMAT:
                raise ConfigError(f"{path} does not hold a batch: name a file that save_data_proto wrote")
            if mark.get("schema") != _SCHEMA:
                raise ConfigError(
                    f"{path} has schema {mark.get('schema')}, but this version reads {_SCHEMA}: use the version that "
                    "wrote it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping
        return from_tensors(tensors)
    except (OSError, SafetensorError, KeyError, orjson.JSONDecodeError) as error:
        raise ConfigError(
            f"no batch can be read from {path} ({error}): it must be a complete file that save_data_proto wrote"
        ) from error


def to_tensors(batch: DataProto) -> dict[str, Tensor]:
    """Return the whole content of ``batch`` as named tensors, on the CPU and without shared storage."""
    batch.check_consistency()
    tensors = {f"batch/{key}": _dense(tensor) for key, tensor in batch.batch.items()}
    arrays = {key: list(array) for key, array in batch.non_tensor_batch.items()}
    rest = {
        "batch": list(batch.batch),
        "non_tensor_batch": _json_section("non_tensor_batch", arrays, tensors),
        "meta_info": _json_section("meta_info", batch.meta_info, tensors),
    }
    tensors[_JSON] = torch.frombuffer(bytearray(orjson.dumps(rest)), dtype=torch.uint8)
    return tensors


def from_tensors(tensors: Mapping[str, Tensor]) -> DataProto:
    """Return the batch from the tensors of :func:`to_tensors`, on the CPU."""
    rest = orjson.loads(tensors[_JSON].numpy().tobytes())
    return DataProto(
        {key: tensors[f"batch/{key}"] for key in rest["batch"]},
        {key: object_array(_from_json(values, tensors)) for key, values in rest["non_tensor_batch"].items()},
        {key: _from_json(value, tensors) for key, value in rest["meta_info"].items()},
    )


def _dense(tensor: Tensor) -> Tensor:
    """Return a copy: safetensors rejects tensors that share storage, such as views of a batch."""
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def _json_section(where: str, values: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    section = {}
    for key, value in values.items():
        try:
            section[key] = orjson.Fragment(orjson.dumps(_to_json(value, tensors, f"{where}/{key}")))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where}[{key!r}] cannot be stored without pickle: {error}; use numbers, text, lists, dicts, tensors "
                "or numeric arrays, or pop it first"
            ) from error
    return section


def _to_json(value: Any, tensors: dict[str, Tensor], name_prefix: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {_KIND: "float", "value": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        name = f"{name_prefix}/{len(tensors)}"
        tensors[name] = _dense(value) if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        return {_KIND: "tensor" if isinstance(value, Tensor) else "array", "value": name}
    if isinstance(value, list):
        return [_to_json(item, tensors, name_prefix) for item in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", "value": _to_json(list(value), tensors, name_prefix)}
    if isinstance(value, dict):
        if _KIND not in value and all(isinstance(key, str) for key in value):
            return {key: _to_json(item, tensors, name_prefix) for key, item in value.items()}
        return {_KIND: "dict", "value": [_to_json(list(pair), tensors, name_prefix) for pair in value.items()]}
    raise TypeError(f"it contains {form_of(value)}")


def _from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _from_json(item, tensors) for key, item in value.items()}
    kind, inner = value[_KIND], value["value"]
    if kind == "tensor":
        return tensors[inner]
    if kind == "array":
        return tensors[inner].numpy()
    return {"float": float, "tuple": tuple, "dict": dict}[kind](_from_json(inner, tensors))


class BatchCache:
    """One file per training step; ``made_under`` are the settings that a batch depends on, by name, as JSON values."""

    def __init__(self, directory: Path | str, made_under: Mapping[str, Any]) -> None:
        self._directory = Path(directory)
        self._made_under = orjson.loads(orjson.dumps(made_under))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"rollout_cache {str(directory)!r} cannot be created: {error}: choose another folder"
            ) from error
        if (first := min(self._directory.glob("step_*.safetensors"), default=None)) is not None:
            self._load(first)

    def batch(self, step: int, make: Callable[[], DataProto]) -> DataProto:
        """Return the batch of a step; if there is no file, call ``make`` and store its result."""
        path = self._directory / f"step_{step}.safetensors"
        if path.exists():
            return self._load(path)
        batch = make()
        marked = {**batch.meta_info, _MADE_UNDER: self._made_under}
        save_data_proto(DataProto(batch.batch, batch.non_tensor_batch, marked), path)
        return batch

    def _load(self, path: Path) -> DataProto:
        batch = load_data_proto(path)
        if changed := differences(batch.meta_info.pop(_MADE_UNDER, {}), self._made_under):
            raise ConfigError(
                f"{path} was made under another config: {changed}. Restore these values, or choose "
                "another rollout_cache"
            )
        return batch
