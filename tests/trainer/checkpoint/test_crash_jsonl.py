"""F48, T5, T6: torn or damaged JSONL files keep their whole lines."""

from __future__ import annotations
import errno
import io
import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any
import orjson
import pytest
from areal_lite.api import InferenceEngineConfig
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory
from areal_lite.errors import ConfigError, StorageError
from areal_lite.rollout.dumps.dump_writer import write_file
from areal_lite.rollout.dumps.trajectory_dumper import TrajectoryDumper
from areal_lite.tools.foreign_files import read_records
from areal_lite.trainer.metrics import MetricsWriter
from tests import fork_server
from tests.trainer.crash_states import files_end_at

STEPS = 12
ALL = 10**9


@pytest.fixture
def metrics(tmp_path: Path) -> bytes:
    """Files that a run of some steps has written."""
    writer = MetricsWriter(tmp_path)
    for step in range(1, STEPS + 1):
        writer.write(step, {"train/loss": 1 / step, "train/entropy": float("nan"), "timing/step_s": 0.25})
    return (tmp_path / "metrics.jsonl").read_bytes()


def whole_lines(content: bytes) -> list[bytes]:
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def test_t5_metrics_cut_at_any_byte_keep_whole_lines_and_can_be_appended(metrics: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for end in range(len(metrics) + 1):
        path.write_bytes(metrics[:end])
        writer = MetricsWriter(tmp_path, last_step=ALL)
        writer.write(99, {"train/loss": 0.5})
        *kept, new = path.read_bytes().splitlines(keepends=True)
        assert kept == whole_lines(metrics[:end])
        assert json.loads(new)["step"] == 99


def test_t5_a_flipped_byte_in_metrics_is_reported_with_its_line(metrics: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for place in range(len(metrics) - 1):  # without the last newline the last line is a torn one
        path.write_bytes(metrics[:place] + bytes([metrics[place] ^ 0x80]) + metrics[place + 1 :])
        start = metrics[:place].rfind(b"\n") + 1
        with pytest.raises(StorageError, match=f"the line at byte {start} is not a record"):
            MetricsWriter(tmp_path, last_step=ALL)


def test_damage_after_the_resumed_step_does_not_matter(metrics: bytes, tmp_path: Path) -> None:
    lines = metrics.splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:5]) + b"damaged\n" + lines[6])
    MetricsWriter(tmp_path, last_step=4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:4])


DUMP = [{"sample_idx": number, "completion": 'é"\n' * number, "turns": [{"ids": [1, 2]}]} for number in range(12)]


def test_t5_a_dump_cut_at_any_byte_keeps_its_whole_records(tmp_path: Path) -> None:
    content = b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in DUMP)
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    path = tmp_path / "dump.jsonl"
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        whole = sum(line_end - 1 <= end for line_end in ends)  # a record is whole before its newline
        assert list(read_records(path)) == DUMP[:whole]


def test_t5_a_flipped_byte_in_a_dump_is_reported_with_its_line(tmp_path: Path) -> None:
    content = b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in DUMP)
    path = tmp_path / "dump.jsonl"
    for place in range(len(content) - 1):
        if content[place] >= 0x80:
            continue  # another character of another language is a character too
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x80]) + content[place + 1 :])
        number, start = content[:place].count(b"\n") + 1, content[:place].rfind(b"\n") + 1
        with pytest.raises(ConfigError, match=f"line {number}: not JSON.*begins at byte {start}"):
            list(read_records(path))


# -- disks that fail --------------------------------------------------------------------------------


def test_t6_metrics_on_a_full_disk_keep_their_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"train/loss": 0.5})
    first = path.read_bytes()
    for size in range(len(first), 2 * len(first)):
        path.write_bytes(first)
        writer = MetricsWriter(tmp_path)
        with (
            files_end_at(size),
            pytest.raises(
                StorageError, match="(File too large|no room for a whole line).*free disk space.*resume from"
            ),
        ):
            for step in (2, 3):
                writer.write(step, {"train/loss": 0.5})
        writer = MetricsWriter(tmp_path, last_step=ALL)
        writer.write(4, {"train/loss": 0.5})
        assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] in ([1, 4], [1, 2, 4])


@pytest.mark.parametrize("number", [1, 2], ids=["to cut it off", "to append"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EINTR, errno.EMFILE])
def test_t6_metrics_that_cannot_be_opened_are_a_storage_error(
    code: int, number: int, metrics: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = io.open, itertools.count(1)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(opened) == number:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", faulty)
        with pytest.raises(StorageError, match=os.strerror(code)):
            MetricsWriter(tmp_path, last_step=ALL)
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


def test_t6_a_full_disk_leaves_no_part_of_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", fork_server.RealPopen)  # the writer has the limits of this process
    config = InferenceEngineConfig(fileroot=str(tmp_path), experiment_name="e", trial_name="t", consumer_batch_size=1)
    result = Group(
        task_id=0,
        group_id="0",
        status=EpisodeStatus.FAILED,
        data={},
        trajectories=[Trajectory(status=EpisodeStatus.FAILED)],
    )
    path = tmp_path / "e" / "t" / "rollout" / "0" / "0.jsonl"

    def dump() -> None:
        dumper = TrajectoryDumper(config)
        dumper.put(result)
        dumper.close()

    dump()
    record = path.read_bytes()
    for file in path.parent.iterdir():  # the dump and its chain
        file.unlink()
    for size in range(len(record)):
        with files_end_at(size), pytest.raises(OSError, match="File too large"):
            write_file(str(path.parent), path.stem, record)
        assert list(path.parent.iterdir()) == []
    with files_end_at(len(record) - 1):
        with pytest.raises(StorageError, match=f"{path} .{len(record)} bytes. cannot be written: File too large"):
            dump()
        assert list(path.parent.iterdir()) == []
    dump()
    assert path.read_bytes() == record
