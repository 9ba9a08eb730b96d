"""Reuse rollouts between runs: each step's batch is stored in a file and read back by later runs."""

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
        made_under: Settings that a batch depends on, by name; JSON values.

    Raises:
        ConfigError: If the directory cannot be created, or holds batches made under other settings.
    """

    def __init__(self, directory: Path | str, made_under: Mapping[str, Any]) -> None:
        self._directory = Path(directory)
        self._made_under = orjson.loads(orjson.dumps(made_under))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"rollout_cache {str(directory)!r} cannot be created: {error}: choose another folder"
            ) from error
        for path in sorted(self._directory.glob("step_*.safetensors"))[:1]:
            self._load(path)

    def batch(self, step: int, make: Callable[[], DataProto]) -> DataProto:
        """Return the batch of a step; if there is no file, call ``make`` and store its result.

        Raises:
            ConfigError: If the file was made under other settings, or is not a complete batch.
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
        saved, current = batch.meta_info.pop(_MADE_UNDER, {}), self._made_under
        differences = [
            f"{name} was {saved.get(name)!r} and is {current.get(name)!r}"
            for name in sorted(saved.keys() | current.keys())
            if saved.get(name) != current.get(name)
        ]
        if differences:
            raise ConfigError(
                f"{path} was made under another config: {'; '.join(differences)}. Restore these values, or choose "
                "another rollout_cache"
            )
        return batch
