"""metrics.jsonl holds whole records up to the current step, or the run ends with an error."""

from __future__ import annotations
import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
import pytest
from areal_lite.errors import StorageError
from areal_lite.trainer.metrics import MetricsWriter


def records(run_dir: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_record_is_one_json_line_after_those_already_there(tmp_path: Path) -> None:
    run_dir = tmp_path / "experiment" / "run"
    for step in (1, 2):
        writer = MetricsWriter(run_dir)
        writer.write(step, {"loss": 0.5, "entropy": math.nan})
    first, second = records(run_dir)
    assert (first["step"], first["loss"], first["entropy"], second["step"]) == (1, 0.5, None, 2)
    assert first["time"] is not None and first["time"] > 1e9


def test_a_resumed_run_replaces_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    writer = MetricsWriter(tmp_path, last_step=2)
    writer.write(3, {"loss": 2.0})
    assert [(one["step"], one["loss"]) for one in records(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_torn_line_right_after_the_last_step_is_removed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    MetricsWriter(tmp_path, last_step=1)
    assert records(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize("damaged", ["no JSON", '{"time": 2}', '{"step": null}', "3"])
def test_a_damaged_line_is_named_by_its_place(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + damaged + '\n{"step": 3}\n')
    with pytest.raises(StorageError, match="damaged: the line at byte 12 is not a record"):
        MetricsWriter(tmp_path, last_step=3)


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Let no file grow beyond ``size`` bytes, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_mid_line_ends_the_run(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss": 0.5})
    room = (tmp_path / "metrics.jsonl").stat().st_size + 10
    with (
        files_end_at(room),
        pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written") as caught,
    ):
        writer.write(2, {"loss": 0.5})
    assert caught.value.exit_code == 74


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        MetricsWriter(tmp_path / "run")
