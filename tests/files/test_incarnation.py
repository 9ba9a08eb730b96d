"""A start of a run that was taken for dead writes nothing: no checkpoint, dump, record, batch or weights."""

from __future__ import annotations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.errors import StorageError
from areal_lite.files.incarnation import Incarnation
from areal_lite.rollout.dumps.trajectory_dumper import TrajectoryDumper
from areal_lite.runs.rl_run import RLRun
from areal_lite.runs.training_run import RunFiles
from areal_lite.trainer.checkpoint.checkpoint import CheckpointWriter

NEWER = "belongs to start 2 of the run, and this is start 1, which may write nothing there"


@pytest.fixture
def first(tmp_path: Path) -> Incarnation:
    return Incarnation.begin(tmp_path)


def test_each_start_has_a_number_and_ends_the_earlier_ones(first: Incarnation, tmp_path: Path) -> None:
    first.check()
    Incarnation(tmp_path / "none").check()
    second = Incarnation.begin(tmp_path)
    second.check()
    with pytest.raises(StorageError, match=NEWER):
        first.check()


@pytest.mark.parametrize("text", ["", "two", "-1", "1.5", "\u0661"])
def test_a_file_without_a_number_says_what_to_write(text: str, tmp_path: Path) -> None:
    (tmp_path / "incarnation").write_text(text)
    with pytest.raises(StorageError, match="write one there that is higher than any earlier start's"):
        Incarnation.begin(tmp_path)


def test_an_older_start_writes_no_checkpoint(first: Incarnation, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "checkpoints", keep=1)
    Incarnation.begin(tmp_path)
    with pytest.raises(StorageError, match=NEWER):
        writer._commit(1, lambda folder: None)
    assert not list(tmp_path.glob("checkpoints/*"))


def test_an_older_start_dumps_nothing(tmp_path: Path) -> None:
    config = InferenceEngineConfig(fileroot=str(tmp_path))
    Incarnation.begin(config.run_dir)
    dumper = TrajectoryDumper(config)
    Incarnation.begin(config.run_dir)
    failed = Trajectory(status=EpisodeStatus.FAILED, made_turns=[])
    group = Group(task_id=0, group_id="0", status=EpisodeStatus.FAILED, data={}, trajectories=[failed])
    dumper.put(group)
    with pytest.raises(StorageError, match=NEWER):
        dumper.close()
    assert not list(tmp_path.rglob("*.jsonl"))


def test_an_older_start_records_takes_and_publishes_nothing(first: Incarnation, tmp_path: Path) -> None:
    Incarnation.begin(tmp_path)
    nothing: Any = None
    files = RunFiles(run_dir=tmp_path, checkpoints=nothing, metrics=SimpleNamespace(), incarnation=first)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match=NEWER):
        files.record(1, {})
    run: Any = SimpleNamespace(files=files, step=1)
    for act in (RLRun.generate, RLRun.publish):
        with pytest.raises(StorageError, match=NEWER):
            act(run)
