"""Rollouts made once and trained many times: a step's batch is kept in a file and read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from areal_lite.data.data_proto import DataProto
from areal_lite.data.data_proto_file import load_data_proto, save_data_proto
from areal_lite.errors import ConfigError

_FINGERPRINT = "cached_batch_fingerprint"


def cached_batch(
    directory: Path | str, step: int, make: Callable[[], DataProto], *, fingerprint: str
) -> DataProto:
    """Return the batch of ``directory/step_{step}.safetensors``; where it is missing, make and keep it.

    Args:
        directory: One file per training step.
        step: The training step.
        make: Rolls the step out; not called where the file is there.
        fingerprint: What the batch depends on, such as a hash of the config.

    Raises:
        ConfigError: If the file was made under another fingerprint, or holds no whole batch.
        StorageError: If it cannot be written.
    """
    path = Path(directory) / f"step_{step}.safetensors"
    if not path.exists():
        batch = make()
        marked = {**batch.meta_info, _FINGERPRINT: fingerprint}
        save_data_proto(DataProto(batch.batch, batch.non_tensor_batch, marked), path)
        return batch
    batch = load_data_proto(path)
    found = batch.meta_info.pop(_FINGERPRINT, None)
    if found != fingerprint:
        raise ConfigError(
            f"{path} was made under {found!r}, and this run is {fingerprint!r}: go back to the config that made it, or "
            "choose another folder"
        )
    return batch
