"""Writes checkpoints in the background while training continues.

Guarantees that checkpoints are complete or absent, that an older one is deleted only after a newer one was read back,
and that any failure is raised by the next call, at the latest when the context ends.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from areal_lite.errors import CheckpointError, StorageError
from areal_lite.trainer.atomic_folder import check_folder, remove_folder, sweep, write_folder
from areal_lite.trainer.checkpoint import checkpoint_folder, checkpoints, refuse_later
from areal_lite.trainer.crash_points import crash_point
from areal_lite.trainer.ranks import Ranks
from areal_lite.trainer.snapshot import Snapshot, write_snapshot

SPARE = 1.2
"""Free space required for a checkpoint, as a multiple of its size; the surplus is for other files of the run."""


class CheckpointWriter:
    """One write at a time, in a thread; only rank 0 writes.

    Args:
        root: Folder of the run's checkpoints; leftovers of a killed writer are removed.
        keep: Number of newest checkpoints to keep.

    Raises:
        CheckpointError: If older ones are to be removed but the newest is damaged.
    """

    def __init__(self, root: Path | str, *, keep: int) -> None:
        self._root = Path(root)
        self._keep = keep
        self._writes = Ranks.current().rank == 0
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        if self._writes:
            sweep(self._root)
            found = checkpoints(self._root)
            if len(found) > keep:  # the last run was killed before it could delete
                check_folder(found[-1])
                self._remove_older()

    def save(self, step: int, snapshot: Snapshot, files: Mapping[str, bytes]) -> None:
        """Start writing the checkpoint after ``step`` steps; wait for the previous write first.

        Args:
            snapshot: The trainer's state; its memory is freed after the write, unless the caller keeps it.
            files: Further files of the same moment, by path inside the checkpoint.

        Raises:
            StorageError: If the disk has too little space, or the previous write failed; older checkpoints stay.
            CheckpointError: If a checkpoint of this or a later step exists.
        """
        self.wait()
        if not self._writes:
            return
        refuse_later(self._root, step - 1)
        self._check_space(step, snapshot.num_bytes + sum(map(len, files.values())))
        self._thread = threading.Thread(
            target=self._run, args=(step, snapshot, files), name="areal-lite-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current write.

        Raises:
            StorageError: If the write failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"the last checkpoint was not written either: {failure}")

    def _check_space(self, step: int, num_bytes: int) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._root).free
        except OSError as error:
            raise StorageError(f"checkpoints cannot be written to {self._root}: {error}") from error
        if free < SPARE * num_bytes:
            raise StorageError(
                f"the checkpoint of step {step} takes {num_bytes} bytes and {self._root} has {free} free, but "
                f"{SPARE} times its size is needed. Free disk space, or keep fewer with checkpoint.keep"
            )

    def _run(self, step: int, snapshot: Snapshot, files: Mapping[str, bytes]) -> None:
        try:
            self._write(step, snapshot, files)
        except Exception as error:  # the training thread raises it
            self._error = error

    def _write(self, step: int, snapshot: Snapshot, files: Mapping[str, bytes]) -> None:
        def write(temporary: Path) -> None:
            write_snapshot(snapshot, temporary, step)
            for name, content in files.items():
                path = temporary / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            crash_point("checkpoint:after_files")

        folder = checkpoint_folder(self._root, step)
        write_folder(folder, write, kind="checkpoint", version=step)
        try:
            check_folder(folder)
        except CheckpointError as error:
            remove_folder(folder, kind="checkpoint")
            raise StorageError(f"the new checkpoint cannot be read back: {error}: check the disk") from error
        crash_point("checkpoint:before_delete")
        self._remove_older()
        crash_point("checkpoint:after_delete")

    def _remove_older(self) -> None:
        for older in checkpoints(self._root)[: -self._keep]:
            remove_folder(older, kind="checkpoint")
