"""Folders that appear whole, survive a crash once they are written, and leave nothing behind."""

from __future__ import annotations
import os
from pathlib import Path
from typing import Any
import pytest
from areal_lite.errors import StorageError
from areal_lite.files.atomic_folder import remove_folder, sweep, write_folder
from tests.trainer.crash_states import Recorder


def fill(folder: Path) -> None:
    (folder / "layers").mkdir()
    (folder / "layers" / "weights").write_bytes(b"weights")
    (folder / "config").write_bytes(b"config")


def write(folder: Path) -> None:
    write_folder(folder, fill, kind="weights", version=1)


def next_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def test_other_users_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write(tmp_path / "v1")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "v1", *(tmp_path / "v1").rglob("*"))}
    files = dict.fromkeys(["weights", "config", "manifest.json"], 0o644)
    assert modes == {"v1": 0o755, "layers": 0o755, **files}


def test_parents_are_made(tmp_path: Path) -> None:
    write(tmp_path / "run" / "weights" / "v1")
    assert (tmp_path / "run" / "weights" / "v1" / "config").read_bytes() == b"config"


def test_after_the_call_no_crash_loses_it_or_brings_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "weights"
    root.mkdir()
    recorder = Recorder(root)
    with recorder.watching(monkeypatch):
        write(root / "v1")
        recorder.states.clear()
    content = {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}
    assert [dict(state) for state in recorder.states] == [content]
    with recorder.watching(monkeypatch):
        remove_folder(root / "v1", kind="weights")
        recorder.states.clear()
    assert recorder.states
    assert not any("v1" in dict(state) for state in recorder.states)


def test_nothing_else_stays(tmp_path: Path) -> None:
    descriptor = next_descriptor()
    write(tmp_path / "v1")
    write(tmp_path / "v1")
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]
    remove_folder(tmp_path / "v1", kind="weights")
    assert list(tmp_path.iterdir()) == []
    assert next_descriptor() == descriptor


def test_leftovers_are_gone_before_the_disk_must_hold_more(tmp_path: Path) -> None:
    (tmp_path / ".areal-lite-tmp-dead").mkdir()
    seen: list[int] = []
    write_folder(tmp_path / "v1", lambda _: seen.append(len(list(tmp_path.iterdir()))), kind="weights", version=1)
    assert seen == [1]


def test_leftovers_that_cannot_be_deleted_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "v1")

    def busy(*args: Any, **kwargs: Any) -> None:
        raise OSError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        write(tmp_path / "v1")
        remove_folder(tmp_path / "v1", kind="weights")
    assert not (tmp_path / "v1").exists()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_cannot_be_deleted(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be deleted"):
        remove_folder(tmp_path / "v1", kind="weights")
