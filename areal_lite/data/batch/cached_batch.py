"""Rollouts made once and trained many times: a step's batch is kept in a file and read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.data_proto_file import load_data_proto, save_data_proto
from areal_lite.errors import ConfigError

_MADE_UNDER = "cached_batch_made_under"


class BatchCache:
    """One file per training step.

    Args:
        directory: Of the files.
        made_under: What a batch depends on, by name; values that JSON has.

    Raises:
        ConfigError: If the directory cannot be made, or has batches that were made under other values.
    """

    def __init__(self, directory: Path | str, made_under: Mapping[str, Any]) -> None:
        self._directory = Path(directory)
        self._made_under = orjson.loads(orjson.dumps(made_under))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"rollout_cache {str(directory)!r} is no folder that can be made: {error}"
            ) from error
        for path in sorted(self._directory.glob("step_*.safetensors"))[:1]:
            self._load(path)

    def batch(self, step: int, make: Callable[[], DataProto]) -> DataProto:
        """Return the batch of a step; where it is missing, make and keep it.

        Raises:
            ConfigError: If the file was made under other values, or holds no whole batch.
            StorageError: If it cannot be written.
        """
        path = self._directory / f"step_{step}.safetensors"
        if path.exists():
            return self._load(path)
        batch = make()
        marked = {**batch.meta_info, _MADE_UNDER: self._made_under}
        save_data_proto(DataProto(batch.batch, batch.non_tensor_batch, marked), path)
        return batch

    def _load(self, path: Path) -> DataProto:
        batch = load_data_proto(path)
        then, now = batch.meta_info.pop(_MADE_UNDER, {}), self._made_under
        differences = [
            f"{name} was {then.get(name)!r} and is {now.get(name)!r}"
            for name in sorted(then.keys() | now.keys())
            if then.get(name) != now.get(name)
        ]
        if differences:
            raise ConfigError(
                f"{path} was made under another config: {'; '.join(differences)}. Put these back, or choose another "
                "rollout_cache"
            )
        return batch
