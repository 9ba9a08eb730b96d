"""The folder of one run, locked by one process at a time, and the records that grow in it."""

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
import orjson
from areal_lite.api.trajectory import Group
from areal_lite.config.dump import dump_config
from areal_lite.config.run_config import ExperimentConfig
from areal_lite.errors import ConfigError, RunDirBusyError
from areal_lite.files.incarnation import Incarnation
from areal_lite.files.whole_files import append_line, storing, write_whole

logger = logging.getLogger(__name__)
BATCHES = "batches.jsonl"
SKIPPED_UPDATES = "skipped_updates.jsonl"


@contextmanager
def run_directory(config: ExperimentConfig, *, fresh: bool, trains: bool = True) -> Iterator[Path]:
    """Make the run's folder, lock it while the context lasts, and save the config in it.

    With ``fresh`` (no checkpoint of this folder is resumed), a folder with metrics of another training run is refused,
    unless that run made no step, or had this config and made no checkpoint; then its metrics are removed. Without
    ``trains``, the config that a training run saved there stays."""
    path = config.run_dir
    with storing(f"the run directory {path}", "set fileroot to a writable folder"):
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        take_lock(lock, path)
        if trains:
            Incarnation.begin(path)
        if fresh and (path / "metrics.jsonl").exists():
            check_disposable(config, path)
            logger.warning("%s: the run in it ended before its first checkpoint; starting again", path)
            for name in ("metrics.jsonl", SKIPPED_UPDATES):
                (path / name).unlink(missing_ok=True)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        if trains or not (path / "config.yaml").exists():
            with storing(path / "config.yaml"):
                write_whole(path / "config.yaml", dump_config(config).encode())
        yield path
    finally:
        os.close(lock)


def take_lock(lock: int, path: Path) -> None:
    """Lock the folder ``path`` by its open ``.lock``; raises RunDirBusyError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode() or "unknown"
        raise RunDirBusyError(
            f"{path} is held by a run that is still alive (pid {holder}): stop it, or choose another trial_name"
        ) from None


def check_disposable(config: ExperimentConfig, path: Path) -> None:
    """Refuse a folder whose run has anything to lose, or made a step under another config."""
    from areal_lite.trainer.checkpoint.checkpoint import CONFIG_FILE, check_config, checkpoints

    checkpoint = config.checkpoint
    has_model = (path / "model").exists() or bool(checkpoints(path / "checkpoints"))
    if not has_model and b'"train/' not in (path / "metrics.jsonl").read_bytes():
        return
    if has_model or checkpoint.resume == "never" or not checkpoint.enabled or not (path / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{path} already holds a training run, which this one would mix with: choose another name "
            "(trial_name=...), or remove the folder"
        )
    check_config(path, dump_config(config))


def append_batch(run_dir: Path, step: int, groups: Sequence[Group]) -> None:
    """Append the groups that a step trained, in the order of its batch, to batches.jsonl."""
    record: dict[str, Any] = {"step": step, "task_ids": [group.task_id for group in groups]}
    if groups[0].baseline is not None:
        record["baselines"] = [group.baseline for group in groups]
    append_line(run_dir / BATCHES, orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
