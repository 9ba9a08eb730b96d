"""The writer beside training: one write at a time, errors are raised, older checkpoints stay, memory is freed."""

from __future__ import annotations
import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import pytest
from areal_lite.errors import CheckpointError, StorageError, TrainingError
from areal_lite.trainer.checkpoint import checkpoint
from areal_lite.trainer.checkpoint.checkpoint import CheckpointWriter, find_checkpoint
from areal_lite.trainer.checkpoint.snapshot import Snapshot, snapshot
from tests.trainer.resume_loop import LoopTrainer


@pytest.fixture(scope="module")
def taken(tiny: Path) -> Snapshot:
    return snapshot(LoopTrainer(tiny))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes wait until it is set."""
    opened = threading.Event()
    real = checkpoint.write_snapshot

    def waits(*args: Any) -> None:
        assert opened.wait(30)
        real(*args)

    monkeypatch.setattr(checkpoint, "write_snapshot", waits)
    yield opened
    opened.set()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".areal-lite-tmp-"))


def test_saving_returns_at_once_and_closing_waits(taken: Snapshot, gate: threading.Event, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep=1) as writer:
        writer.save(1, taken, {})
        assert names(tmp_path) == []
        gate.set()
    assert names(tmp_path) == ["step_00000001"]


def test_a_write_that_hangs_keeps_no_process_alive(taken: Snapshot, gate: threading.Event, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep=1) as writer:
        writer.save(1, taken, {})
        assert [thread.daemon for thread in threading.enumerate() if thread.name == "areal-lite-checkpoint"] == [True]
        gate.set()


def test_a_second_save_waits_for_the_first(taken: Snapshot, gate: threading.Event, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep=3) as writer:
        writer.save(1, taken, {})
        second = threading.Thread(target=writer.save, args=(2, taken, {}))
        second.start()
        second.join(0.05)
        assert second.is_alive()
        gate.set()
        second.join()
        assert "step_00000001" in names(tmp_path)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_a_written_snapshot_is_freed(tiny: Path, tmp_path: Path) -> None:
    taken = snapshot(LoopTrainer(tiny))
    tensors = [weakref.ref(tensor) for tensor in taken.learners["policy"].weights.values()]
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(1, taken, {})
    del taken
    writer.wait()
    gc.collect()
    assert [tensor() for tensor in tensors if tensor() is not None] == []


def test_a_failure_in_the_thread_is_raised_by_the_next_call_and_only_once(
    taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("no such weight")

    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(1, taken, {})
    writer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_snapshot", broken)
        writer.save(2, taken, {})
        with pytest.raises(KeyError, match="no such weight"):
            writer.save(3, taken, {})
    assert names(tmp_path) == ["step_00000001"]
    writer.save(4, taken, {})
    writer.wait()
    assert names(tmp_path) == ["step_00000004"]
    assert list(tmp_path.glob(".areal-lite-tmp-*")) == []


def test_a_failure_is_raised_by_a_check_without_another_save(
    taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def broken(*args: Any) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_snapshot", broken)
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.check()
    writer.save(1, taken, {})
    with pytest.raises(StorageError, match="No space left on device"):
        while True:  # as after each training step
            failed.wait(30)
            writer.check()
            time.sleep(0.01)
    assert writer.take_metrics() == {}


def test_seconds_and_size_of_a_write_are_metrics_once(taken: Snapshot, tmp_path: Path) -> None:
    began = time.monotonic()
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(1, taken, {})
    writer.wait()
    metrics = writer.take_metrics()
    assert 0 < metrics["write_s"] <= time.monotonic() - began
    assert metrics["gb"] == taken.num_bytes / 1e9
    assert writer.take_metrics() == {}


def test_a_failed_write_does_not_hide_the_error_that_ended_the_run(
    taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(checkpoint, "write_snapshot", broken)
    with (
        pytest.raises(TrainingError, match="diverged") as ended,
        CheckpointWriter(tmp_path, keep=1) as writer,
    ):
        writer.save(1, taken, {})
        raise TrainingError("diverged")
    assert "the last checkpoint was not written" in ended.value.__notes__[0]


def test_f51_no_write_starts_without_enough_disk_space(
    taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    size = taken.num_bytes + 1000
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(1, taken, {})
    writer.wait()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=int(1.2 * size) - 1))
    with pytest.raises(StorageError, match=f"takes {size} bytes.*1.2 times its size"):
        writer.save(2, taken, {"data": bytes(1000)})
    assert names(tmp_path) == ["step_00000001"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=checkpoint.SPARE * size))
    writer.save(2, taken, {"data": bytes(1000)})
    writer.wait()
    assert names(tmp_path) == ["step_00000002"]


def test_f56_old_checkpoints_stay_until_the_new_one_is_verified(
    taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(1, taken, {})
    writer.wait()
    real = os.rename

    def spoils(source: Any, target: Any) -> None:
        (Path(source) / "trainer.json").write_bytes(b"{}")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", spoils)
        writer.save(2, taken, {})
        with pytest.raises(StorageError, match="cannot be read back.*check the disk"):
            writer.wait()
    assert names(tmp_path) == ["step_00000001"]
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "step_00000001"


def test_leftovers_of_a_killed_writer_are_removed_at_the_next_start(tmp_path: Path) -> None:
    for name in (".areal-lite-tmp-abc", ".areal-lite-tmp-step_00000001", ".tmp-of another program"):
        (tmp_path / name / "policy").mkdir(parents=True)
        (tmp_path / name / "policy" / "optimizer.safetensors").write_bytes(b"half")
    CheckpointWriter(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-of another program"]
    CheckpointWriter(tmp_path / "not there yet", keep=1)


def test_f56_older_checkpoints_that_a_killed_writer_kept_are_removed_at_the_next_start(
    taken: Snapshot, tmp_path: Path
) -> None:
    with CheckpointWriter(tmp_path, keep=3) as writer:
        for step in (1, 2, 3):
            writer.save(step, taken, {})
    state = tmp_path / "step_00000003" / "trainer.json"
    content = state.read_bytes()
    state.write_bytes(b"{}")
    CheckpointWriter(tmp_path, keep=3)  # nothing is removed, so nothing is checked
    with pytest.raises(CheckpointError, match="step_00000003"):
        CheckpointWriter(tmp_path, keep=1)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]
    state.write_bytes(content)
    CheckpointWriter(tmp_path, keep=1)
    assert names(tmp_path) == ["step_00000003"]


def test_further_files_may_share_folders_and_the_root_is_made(taken: Snapshot, tmp_path: Path) -> None:
    files = {"data/state/rows.json": b"[1]", "data/state/order.json": b"[2]", "config.yaml": b"seed: 1"}
    root = tmp_path / "run" / "checkpoints"
    with CheckpointWriter(root, keep=1) as writer:
        writer.save(1, taken, files)
    assert {name: (root / "step_00000001" / name).read_bytes() for name in files} == files


def test_a_folder_that_cannot_be_written_is_a_storage_error(taken: Snapshot, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file of checkpoints cannot be written: .*: free disk space or fix"):
        CheckpointWriter(tmp_path / "file", keep=1).save(1, taken, {})
