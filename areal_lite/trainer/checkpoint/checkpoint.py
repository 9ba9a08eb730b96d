"""Checkpoints of a training run, one folder per step: finds, checks and loads them, and writes them in the background.

Guarantees that a checkpoint is complete or absent, that a damaged one is an error and never skipped silently, that an
older one is deleted only after a newer one was read back, and that a failed write is raised by the next call, at the
latest when the context ends. A folder ``step_00000010`` holds the files of ``snapshot``, further
files of the run (its config, the state of its data source), and ``manifest.json`` with the hash of each file.
"""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
import torch
import torch.distributed as dist
import yaml
from safetensors import SafetensorError
from areal_lite.errors import CheckpointError, ConfigError, StorageError
from areal_lite.files.atomic_folder import check_folder, remove_folder, sweep, write_folder
from areal_lite.files.crash_points import crash_point
from areal_lite.files.incarnation import Incarnation
from areal_lite.files.whole_files import storing
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.trainer.checkpoint.snapshot import Snapshot, write_snapshot

CONFIG_FILE = "config.yaml"  # name of the run's resolved config inside a checkpoint
_FOLDER = re.compile(r"step_(\d{8,})")
_FIXED = (
    "model_path.", "seed.", "workflow.", "workflow_kwargs.", "should_accept_fn.", "data_packer.", "reward_model.",
    "trainer.", "train_dataset.", "rollout_global_dataset.", "buffer_filter.", "env.", "rollout.group_size.",
    "rollout.consumer_batch_size.", "rollout.gconfig.", "rollout.rewards.", "rollout.turn_rewards.", "rollout.agents.",
    "rollout.tokenizer_path.", "rollout.mask_offpolicy_in_partial_rollout.",
)  # fmt: skip
"""Keys and sections of the config that must not change on resume, each with a dot after it."""
_MAY_CHANGE = {
    "trainer.total_steps", "trainer.total_epochs", "trainer.epochs", "trainer.max_tokens_per_microbatch",
    "trainer.max_inference_length_per_device", "trainer.device", "trainer.num_threads", "trainer.sp_size",
    "trainer.tp_size", "trainer.gradient_checkpointing", "trainer.deterministic", "train_dataset.path",
    "train_dataset.cache_dir", "train_dataset.num_workers", "train_dataset.filter_overlong_prompts_workers",
    "trainer.kl.teacher.addresses", "trainer.kl.teacher.backend", "trainer.kl.teacher.tokenizer_path",
    "rollout.agents.isolation", "rollout.agents.processes", "rollout.agents.sandbox",
}  # fmt: skip
"""Keys within them that may; the data source compares the content of the rows itself."""
_PART = ".areal-lite-part-"  # prefix of what a rank has written, until the first rank takes it
SPARE = 1.2  # free space required, in sizes of a checkpoint; the surplus is for other files of the run


def find_checkpoint(root: Path, resume: str) -> Path | None:
    """Return the checkpoint that ``resume`` (auto, never or a path) selects; None for a fresh start. The newest is
    never skipped if it is damaged, and an older one is refused while later ones are there."""
    folders = checkpoints(root)
    if resume == "never" and folders:
        raise ConfigError(
            f"checkpoint.resume is never, and {root} already holds a training run: choose another trial_name, or "
            "remove the folder"
        )
    if resume not in ("auto", "never"):
        folder = Path(resume)
        if not folder.is_dir():
            existing = ", ".join(str(one) for one in folders) or "none"
            raise ConfigError(
                f"checkpoint.resume {resume!r} is not a folder: it must be auto, never, or a checkpoint; this run has "
                f"{existing}"
            )
        _check(folder, "the checkpoint", "Name another one in checkpoint.resume")
        refuse_later(root, checkpoint_step(folder))
        return folder
    if not folders:
        return None
    earlier = f" to resume from {folders[-2].name}" if len(folders) > 1 else ""
    _check(folders[-1], "the newest checkpoint", f"Remove {folders[-1]}{earlier}, or set another trial_name")
    return folders[-1]


def check_config(folder: Path, config: str) -> None:
    """Refuse to resume with a config that would train different weights. The length of the run, its devices, what it
    saves and its servers may change; the model, the algorithm, the data and the batch sizes may not."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return
    if differences := list(_differences(yaml.safe_load(path.read_text()), yaml.safe_load(config))):
        raise ConfigError(
            f"{folder} was made with another config: {'; '.join(differences)}. Restore these values to resume, or "
            "start another trial_name"
        )


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints below ``root``, oldest first."""
    return sorted((path for path in root.glob("step_*") if _FOLDER.fullmatch(path.name)), key=_number)


def checkpoint_step(folder: Path) -> int:
    """Return the number of training steps done when the checkpoint was written, also its policy version."""
    try:
        return int(json.loads((folder / "trainer.json").read_bytes())["step"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no trainer.json: to resume, name a checkpoint; to train its weights, set model_path"
        ) from None


def refuse_later(root: Path, step: int) -> None:
    """Refuse to write a second history into one folder: ``root`` may hold no checkpoint of a step after ``step``."""
    if later := [path.name for path in checkpoints(root) if _number(path) > step]:
        raise CheckpointError(
            f"{root} holds {', '.join(later)}, later than step {step}: a run that resumes from there would leave two "
            "histories, and the next start would take the wrong one. Set checkpoint.resume=auto to resume from the "
            "newest, remove or move the later ones, or set another trial_name"
        )


def _check(folder: Path, name: str, hint: str) -> None:
    try:
        check_folder(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{name} cannot be used: {error}. {hint}") from error


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield the differences of the fixed keys that both have; the default of an added one changes nothing."""
    for name in sorted(then.keys() & now.keys()):
        before, after, path = then[name], now[name], section + name
        if type(before) is type(after) is dict and not name.endswith(("kwargs", "logit_bias", "extra")):  # any keys
            yield from _differences(before, after, f"{path}.")
            continue
        # dtype auto is one that was not resolved: by an older version, or by doctor, which looks before a run does.
        may_change = path in _MAY_CHANGE or (section == "trainer." and "auto" in (before, after))
        if before != after and not may_change and f"{path}.".startswith(_FIXED):
            yield f"{path} was {before!r} and is {after!r}"


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """One write at a time, in a thread on each rank: all write their part, and the first makes the folder of them.
    Leftovers of a killed writer are removed. Every rank must make one."""

    def __init__(self, root: Path | str, *, keep: int) -> None:
        self._root = Path(root)
        self._keep = keep
        ranks = Ranks.current()
        self._first = ranks.rank == 0
        self._incarnation = Incarnation(self._root.parent)
        self._group = dist.new_group(backend="gloo") if ranks.size > 1 else None
        self._parts = [self._root / f"{_PART}{rank:05d}" for rank in range(ranks.size)]
        self._part = self._parts[ranks.rank]
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._metrics: dict[str, float] = {}
        if self._first:
            for leftover in self._root.glob(f"{_PART}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            sweep(self._root)
            existing = checkpoints(self._root)
            if len(existing) > keep:  # the last run was killed before it could delete
                check_folder(existing[-1])
                self._remove_older()

    def save(self, step: int, snapshot: Snapshot, files: Mapping[str, bytes]) -> None:
        """Start writing the checkpoint after ``step`` steps; wait for the previous write first, and raise its error.
        ``files`` are further ones of the same moment, by path inside the checkpoint."""
        self.wait()
        if self._first:
            refuse_later(self._root, step - 1)
            self._check_space(step, snapshot.num_bytes + sum(map(len, files.values())))
        self._thread = threading.Thread(
            target=self._run, args=(step, snapshot, files), name="areal-lite-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current write, and raise its error."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise the error of a failed write; does not wait."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def take_metrics(self) -> dict[str, float]:
        """Return seconds and size of the last finished write, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"the last checkpoint was not written either: {failure}")

    def _check_space(self, step: int, num_bytes: int) -> None:
        with storing(f"{self._root} of checkpoints", "free disk space or fix its permissions"):
            self._root.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._root).free
        if free < SPARE * num_bytes:
            raise StorageError(
                f"the checkpoint of step {step} takes {num_bytes} bytes and {self._root} has {free} free, but "
                f"{SPARE} times its size is needed. Free disk space, or keep fewer with checkpoint.keep"
            )

    def _run(self, step: int, snapshot: Snapshot, files: Mapping[str, bytes]) -> None:
        began = time.monotonic()
        try:
            if self._group is None:
                self._commit(step, partial(_write_files, step, snapshot, files))
            else:
                self._write_together(step, snapshot, files)
            self._metrics = {"write_s": time.monotonic() - began, "gb": snapshot.num_bytes / 1e9}
        except Exception as error:  # the training thread raises it
            self._error = error

    def _write_together(self, step: int, snapshot: Snapshot, files: Mapping[str, bytes]) -> None:
        """Write this rank's part; once all have, the first rank makes the checkpoint of the parts, and all go on."""
        with self._agreed(step):
            try:
                self._part.mkdir(parents=True)
                _write_files(step, snapshot, files, self._part)
            except (OSError, SafetensorError) as error:
                raise StorageError(
                    f"{self._part} could not be written: {error}: free disk space or fix its permissions"
                ) from error
        with self._agreed(step):
            if self._first:
                self._commit(step, partial(_take_parts, self._parts))

    @contextmanager
    def _agreed(self, step: int) -> Iterator[None]:
        """Wait for the other ranks, also after an error, and raise StorageError if it was theirs."""
        failed = torch.ones(1)
        try:
            yield
            failed.zero_()
        finally:
            dist.all_reduce(failed, group=self._group)
            if failed.any():
                shutil.rmtree(self._part, ignore_errors=True)
        if failed.any():
            raise StorageError(f"the checkpoint of step {step} was not written: another rank names the reason")

    def _commit(self, step: int, write: Callable[[Path], None]) -> None:
        folder = self._root / f"step_{step:08d}"
        self._incarnation.check()
        write_folder(folder, write, kind="checkpoint", version=step)
        try:
            check_folder(folder)  # before older ones go: a disk may accept what it does not return
        except CheckpointError as error:
            remove_folder(folder, kind="checkpoint")
            raise StorageError(f"the new checkpoint cannot be read back: {error}: check the disk") from error
        crash_point("checkpoint:before_delete")
        self._remove_older()
        crash_point("checkpoint:after_delete")

    def _remove_older(self) -> None:
        for older in checkpoints(self._root)[: -self._keep]:
            remove_folder(older, kind="checkpoint")


def _write_files(step: int, snapshot: Snapshot, files: Mapping[str, bytes], folder: Path) -> None:
    write_snapshot(snapshot, folder, step)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    crash_point("checkpoint:after_files")


def _take_parts(parts: Sequence[Path], folder: Path) -> None:
    for part in parts:
        for path in sorted(part.rglob("*")):
            if path.is_file():
                place = folder / path.relative_to(part)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.rename(place)
        shutil.rmtree(part)
