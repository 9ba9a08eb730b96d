"""T4, T6: a crash or a failing disk at any operation leaves the previous checkpoint or the new one."""

from __future__ import annotations
import builtins
import errno
import io
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
import pytest
from areal_lite.errors import StorageError
from areal_lite.files import crash_points
from areal_lite.files.crash_points import crash_point
from areal_lite.trainer.checkpoint.checkpoint import CheckpointWriter, checkpoints, find_checkpoint
from areal_lite.trainer.checkpoint.snapshot import Snapshot, snapshot
from tests.fixtures.tiny_model import build_tiny_model
from tests.trainer.crash_states import Recorder, Tree, change_tree, files_end_at
from tests.trainer.resume_loop import LoopTrainer

FILES = {"rollout/state.json": b'{"epoch_id": 0}' * 100}


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> list[Snapshot]:
    """Two moments of a very small model."""
    model = build_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=8, num_layers=1)
    trainer = LoopTrainer(model)
    moments = []
    for step in range(2):
        trainer.train_step([[5, 6, 7 + step]])
        moments.append(snapshot(trainer))
    return moments


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def save(root: Path, step: int, taken: Snapshot) -> None:
    with CheckpointWriter(root, keep=1) as writer:
        writer.save(step, taken, FILES)


@pytest.mark.parametrize(("wanted", "at"), [("weights:after_rename", 1), ("weights:after_rename:3", 3)])
def test_a_crash_point_ends_the_process_when_it_is_reached_so_often(
    monkeypatch: pytest.MonkeyPatch, wanted: str, at: int
) -> None:
    monkeypatch.setenv(crash_points.VARIABLE, wanted)
    monkeypatch.setattr(crash_points, "_reached", 0)
    killed: list[int] = []
    for number in range(1, 5):
        monkeypatch.setattr(os, "kill", lambda *_, number=number: killed.append(number))
        crash_point("weights:after_rename")
        for _ in range(2):
            crash_point("weights:after_delete")
    assert killed == [at]


def test_t4_a_crash_leaves_the_previous_checkpoint_or_the_new_one(
    taken: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1, taken[0])
    known = {"step_00000001": contents(root / "step_00000001")}
    recorder = Recorder(root)
    with recorder.watching(monkeypatch):
        save(root, 2, taken[1])  # and deletes the first
    known["step_00000002"] = contents(root / "step_00000002")
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    found = []
    tree: Tree = {}
    for state in recorder.states:
        change_tree(crashed, tree, tree := dict(state))
        folder = find_checkpoint(crashed, "auto")
        assert folder is not None
        for whole in checkpoints(crashed):
            assert contents(whole) == known[whole.name]
        found.append(folder.name)
    assert len(found) >= 2000
    assert set(found) == known.keys()


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, root: Path, number: int, code: int) -> Iterator[list[str]]:
    """Have the ``number``-th operation below ``root`` fail; yield the list of those there were."""
    seen: list[str] = []

    def faulty(name: str, real: Any) -> Any:
        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "fsync" or str(target).startswith(str(root)):
                seen.append(name)
                if len(seen) == number:
                    raise OSError(code, os.strerror(code))
            return real(target, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "open"), (io, "open")):
            patch.setattr(module, name, faulty(name, getattr(module, name)))
        patch.setattr(builtins, "open", faulty("open", builtins.open))
        yield seen


def test_t6_a_failed_file_operation_is_a_storage_error_and_loses_no_checkpoint(
    taken: list[Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, taken[0])
    steps = itertools.count(2)
    codes = itertools.cycle([errno.ENOSPC, errno.EIO, errno.EINTR, errno.EMFILE, errno.EACCES])
    kinds = set()
    for number in itertools.count(1):
        before = find_checkpoint(tmp_path, "auto")
        step = next(steps)
        writer = CheckpointWriter(tmp_path, keep=1)
        with failing(monkeypatch, tmp_path, number, next(codes)) as seen:
            try:
                writer.save(step, taken[1], FILES)
                writer.wait()
                failed = False
            except StorageError:
                failed = True
        if len(seen) < number:
            break
        kinds.add(seen[number - 1])
        assert find_checkpoint(tmp_path, "auto") in ([before] if failed else []) + [tmp_path / f"step_{step:08d}"]
        writer.save(next(steps), taken[1], FILES)
        writer.wait()
        assert [path.name for path in tmp_path.iterdir()] == [f"step_{step + 1:08d}"]
    assert kinds == {"fsync", "rename", "mkdir", "open"}
    assert number > 30


def test_t6_a_full_disk_loses_no_checkpoint(taken: list[Snapshot], tmp_path: Path) -> None:
    """No file may grow beyond a limit, which the longest one always reaches and shorter ones may not."""
    save(tmp_path, 1, taken[0])
    first = contents(tmp_path / "step_00000001")
    longest = max(map(len, first.values()))
    for limit in [0, 100, *range(1000, longest, longest // 12)]:
        writer = CheckpointWriter(tmp_path, keep=1)
        with files_end_at(limit), pytest.raises(StorageError, match="File too large.*free disk space"):
            writer.save(2, taken[1], FILES)
            writer.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
        assert contents(tmp_path / "step_00000001") == first
    save(tmp_path, 2, taken[1])
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
