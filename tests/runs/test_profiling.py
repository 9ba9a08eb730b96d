"""V33: one trace per stretch of consecutive steps, complete however the steps end."""

from __future__ import annotations
import json
import subprocess
import sys
from pathlib import Path
import pytest
from areal_lite.runs.profiling import MemorySnapshots, StepProfiler


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_consecutive_steps_share_one_trace(tmp_path: Path) -> None:
    import torch

    with StepProfiler([2, 3, 5], tmp_path) as profiler:
        for step in range(1, 7):
            with profiler(step):
                torch.ones(step).sum()
    assert names(tmp_path) == ["steps_2-3.json", "steps_5-5.json"]
    events = json.loads((tmp_path / "steps_2-3.json").read_text())["traceEvents"]
    assert sum(event["name"] == "aten::ones" for event in events) == 2


def test_a_step_that_raises_ends_its_trace(tmp_path: Path) -> None:
    profiler = StepProfiler([1, 2], tmp_path)
    with pytest.raises(KeyboardInterrupt), profiler(1):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["steps_1-1.json"]


def test_a_run_that_ends_before_the_chosen_steps_still_writes_its_trace(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from areal_lite.runs.profiling import StepProfiler\n"
        "with StepProfiler([1, 2, 3], Path(sys.argv[1])) as profiler:\n"
        "    for step in (1, 2):\n"
        "        with profiler(step): pass\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert names(tmp_path) == ["steps_1-2.json"]


def test_each_rank_writes_its_own_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with StepProfiler([1], tmp_path)(1):
            pass
    assert names(tmp_path) == ["steps_1-1.json", "steps_1-1.rank1.json"]


def test_a_memory_snapshot_has_each_tensor_once_by_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    snapshots = MemorySnapshots([2], tmp_path / "memory")
    for step in (1, 2, 3):
        with snapshots(step):
            held = [torch.zeros(3, 1000 + step) for _ in range(2)]
            views = [held[0].view(-1), held[0][1:]]
    monkeypatch.setenv("RANK", "1")
    with snapshots(2):
        del held, views
    assert names(tmp_path / "memory") == ["step_2.json", "step_2.rank1.json"]
    first, second = (json.loads(path.read_bytes()) for path in sorted((tmp_path / "memory").iterdir()))
    kind = {"device": "cpu", "dtype": "float32", "shape": "[3, 1002]"}
    assert {**kind, "count": 2, "bytes": 2 * 4 * 3 * 1002} in first["tensors"]
    assert not any(each["shape"] in ("[3, 1002]", "[3, 1003]", "[2, 1003]") for each in second["tensors"])
    assert first["tensor_bytes"] == sum(each["bytes"] for each in first["tensors"])
