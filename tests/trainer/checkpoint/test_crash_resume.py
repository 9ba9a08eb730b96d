"""T3, T14: a run killed at any points ends bit for bit like an uninterrupted one."""

from __future__ import annotations
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
import pytest
import areal_lite
from areal_lite.files.crash_points import VARIABLE
from tests.fixtures.tiny_model import build_tiny_model
from tests.trainer.resume_loop import BATCH, ROWS, STEPS

CRASH_POINTS = (
    *("metrics:before_write", "metrics:after_write"),
    *(f"checkpoint:{name}" for name in ("before_model", "after_model", "after_optimizer", "after_state")),
    *("checkpoint:after_files", "checkpoint:before_delete", "checkpoint:after_delete", "weights:after_delete"),
    *(f"{kind}:during_delete" for kind in ("checkpoint", "weights")),
    *(
        f"{kind}:{name}"
        for kind in ("checkpoint", "weights", "model")
        for name in ("before_manifest", "after_manifest", "after_rename")
    ),
)
KILLS = 20
KILLED = -9

Run = Callable[..., int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return a function that runs the loop in a process of its own and returns its exit code."""
    model = build_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=16, num_layers=1)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.resume_loop"],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin and server.stdout

    def run(run_dir: Path, *, kill_after_s: float | None = None, environment: Any = None) -> int:
        order = {
            "run_dir": str(run_dir),
            "model": str(model),
            "kill_after_s": kill_after_s,
            "environment": environment or {},
        }
        server.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
        server.stdin.flush()  # type: ignore[union-attr]
        return int(server.stdout.readline())  # type: ignore[union-attr]

    with server:
        assert server.stdout.readline() == "ready\n"
        yield run
        server.stdin.close()


@pytest.fixture(scope="module")
def whole(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of an uninterrupted run (checked to be deterministic), and its seconds."""
    run_dirs = [tmp_path_factory.mktemp("whole") for _ in range(2)]
    seconds = []
    for run_dir in run_dirs:
        began = time.monotonic()
        assert run(run_dir) == 0
        seconds.append(time.monotonic() - began)
    whole = what_is_left(run_dirs[0])
    check(run_dirs[1], whole)
    return whole | {"seconds": min(seconds)}


def what_is_left(run_dir: Path) -> dict[str, Any]:
    """Return every byte that must be the same, and every record without its time of day."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name != "metrics.jsonl")
    return {
        "records": [{name: value for name, value in record.items() if name != "time"} for record in records],
        "files": {str(path.relative_to(run_dir)): path.read_bytes() for path in files},
    }


def check(run_dir: Path, whole: dict[str, Any]) -> None:
    left = what_is_left(run_dir)
    assert left["records"] == whole["records"]
    assert left["files"].keys() == whole["files"].keys()  # nothing half written lies about
    assert [name for name in left["files"] if left["files"][name] != whole["files"][name]] == []


def test_t14_the_uninterrupted_run_trains_each_row_once_per_epoch(whole: dict[str, Any]) -> None:
    rows = [record[f"row_{place}"] for record in whole["records"] for place in range(BATCH)]
    epochs = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    assert len(epochs) == STEPS * BATCH // ROWS > 1
    assert all(Counter(epoch) == Counter(range(ROWS)) for epoch in epochs)
    assert len({record["drawn"] for record in whole["records"]}) == STEPS


def test_t3_a_run_killed_at_any_time_ends_like_an_uninterrupted_one(
    run: Run, whole: dict[str, Any], tmp_path: Path
) -> None:
    """Kill -9 at 20 random times; each run is resumed until it ends, then the next one starts."""
    times = random.Random(20)
    kills = runs = midway = 0
    while kills < KILLS:
        run_dir = tmp_path / str(runs)
        runs += 1
        while (code := run(run_dir, kill_after_s=times.uniform(0, whole["seconds"]))) == KILLED:
            kills += 1
            metrics = run_dir / "metrics.jsonl"
            midway += metrics.exists() and b"\n" in metrics.read_bytes()
        assert code == 0
        check(run_dir, whole)
    assert midway >= KILLS // 4  # steps were done before the kill, and more were to come


def test_every_crash_point_is_tested() -> None:
    package = Path(areal_lite.__file__).parent
    calls = {
        call for file in package.rglob("*.py") for call in re.findall(r'crash_point\(f?"(.*)"\)', file.read_text())
    }
    assert {point if point in calls else f"{{kind}}:{point.partition(':')[2]}" for point in CRASH_POINTS} == calls


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_t3_a_run_killed_at_each_crash_point_ends_like_an_uninterrupted_one(
    point: str, run: Run, whole: dict[str, Any], tmp_path: Path
) -> None:
    time_reached = 1 if point.startswith("model:") else 2
    assert run(tmp_path, environment={VARIABLE: f"{point}:{time_reached}"}) == KILLED
    assert run(tmp_path) == 0
    check(tmp_path, whole)
