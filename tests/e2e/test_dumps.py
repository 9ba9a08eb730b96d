"""Dumps of real runs on full disks and after kills: a file is one whole group, and missing groups are counted."""

from __future__ import annotations
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
import pytest
from areal_lite.config.loader import load_config
from areal_lite.rollout.dumps.dump_lines import CHAIN
from areal_lite.runs.entry_points import run_training
from tests.e2e.test_stopping import start, until_step

GROUP_SIZE = 4


def check_groups(run_dir: Path) -> int:
    """Check that every file below the dumps is one whole group, and return how many there are."""
    files = [path for path in run_dir.glob("*rollout/**/*") if path.is_file() and not path.name.startswith(CHAIN)]
    for path in files:
        text = path.read_text()
        assert text.endswith("\n")
        lines = [json.loads(line) for line in text.splitlines()]
        assert {(str(line["task_id"]), line["timings"]["finished_at"]) for line in lines} == {
            (path.stem, lines[0]["timings"]["finished_at"])
        }
        assert [line["sample_idx"] for line in lines] == list(range(len(lines)))
        assert {line["member_idx"] for line in lines} == set(range(1 if "eval" in str(path) else GROUP_SIZE))
    assert len({path.name for path in files}) == len(files)
    return len(files)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 128 KiB where the run will dump."""
    folder = tmp_path / "runs" / "e2e" / "t" / "rollout"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_the_run_with_the_path_and_the_number_of_missing_groups(
    served_yaml: Path, small_disk: Path
) -> None:
    process = start(served_yaml, "eval_dataset=null")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 74, errors
    assert "step    2 " in output  # the disk took some
    first, second = (line for line in errors.splitlines() if line.startswith("error: "))
    assert first.startswith(f"error: the dump {small_disk}/")
    assert "bytes) cannot be written: No space left on device: free disk space" in first
    assert second.endswith(f" ended groups are not dumped below {small_disk.parent}")
    assert int(second.split()[1]) >= 1
    assert "Traceback" not in errors
    assert check_groups(small_disk.parent) >= 8


def test_a_run_killed_before_its_first_checkpoint_leaves_the_files_of_its_earlier_life_alone(
    served_yaml: Path,
) -> None:
    with start(served_yaml) as process:
        until_step(process, 2)
        process.kill()
    run_dir = served_yaml.parent / "runs" / "e2e" / "t"
    assert not list(run_dir.glob("checkpoints/*"))
    before = {path: path.read_bytes() for path in run_dir.glob("*rollout/*/*.jsonl")}
    run_training(load_config(served_yaml, ["trainer.total_steps=3"]))
    for unfinished in run_dir.glob("*rollout/*/.unfinished-*"):
        unfinished.unlink()  # of the kill
    assert {path: path.read_bytes() for path in before} == before
    assert check_groups(run_dir) == len(before) + 3 * 4 + 2 * 4  # trained, and evaluated twice
