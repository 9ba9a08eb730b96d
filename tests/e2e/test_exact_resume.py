"""T3, DESIGN 7: the real command, killed at any point, ends bit for bit like an uninterrupted one."""

from __future__ import annotations
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
import pytest
from areal_lite.files.crash_points import VARIABLE

STEPS = 6
DETERMINISTIC = [
    "trainer.deterministic=true",
    "trainer.minibatches_per_step=2",
    "rollout.max_head_offpolicyness=0",
    f"trainer.total_steps={STEPS}",
    "checkpoint={every_steps: 1, keep: 1}",
    "dump_scores=true",
    "evaluation.at_start=false",
]

OF_THE_PROCESS = re.compile(
    r"time|timing/|seconds|ms_per_token|tokens_per_second|mfu|perf/|checkpoint/|generated_tokens|episodes/|servers/"
)
"""Metrics of time and memory, and of episodes and servers since the process started."""


def start(run_yaml: Path, trial: str, **environment: str) -> subprocess.Popen[str]:
    command = ["train", str(run_yaml), f"trial_name={trial}", *DETERMINISTIC]
    return subprocess.Popen(
        [sys.executable, "-m", "areal_lite", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def kill_after_a_step(process: subprocess.Popen[str], seconds: float) -> None:
    """Kill the process some time after it reports its first step."""
    with process:
        assert process.stdout is not None
        assert any(line.startswith("step ") for line in process.stdout)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()


def what_is_left(run_dir: Path) -> dict[str, Any]:
    """Return what must be the same: records but for clocks, batches in their order, and the bytes of all weights."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    folders = [run_dir / "model", run_dir / "checkpoints" / f"step_{STEPS:08d}"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    named = {"config.yaml", "manifest.json"}  # the trial's name is in them
    return {
        "records": [{k: v for k, v in record.items() if not OF_THE_PROCESS.search(k)} for record in records],
        "batches": batches(run_dir),
        "files": {str(p.relative_to(run_dir)): p.read_bytes() for p in files if p.name not in named},
    }


def batches(run_dir: Path) -> dict[str, set[str]]:
    """Return what was trained in each step, the same each time it was: inputs, outputs and scores in their order."""
    found: dict[str, set[str]] = {}
    for path in (run_dir / "scores").iterdir():
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        lines = [[row["input"], row["output"], row["score"]] for row in rows]
        found.setdefault(path.name.split(".")[0], set()).add(json.dumps(lines))
    return found


@pytest.mark.timeout(300)
def test_a_killed_run_ends_with_the_same_weights_losses_and_batches(run_yaml: Path) -> None:
    whole = start(run_yaml, "whole")
    broken = start(run_yaml, "broken", **{VARIABLE: "checkpoint:after_manifest:2"})
    whole.communicate()
    broken.communicate()
    assert (whole.returncode, broken.returncode) == (0, -signal.SIGKILL)
    draw = random.Random(20)
    for _ in range(2):
        kill_after_a_step(start(run_yaml, "broken"), draw.uniform(0.0, 0.1))
    last = start(run_yaml, "broken")
    last.communicate()
    assert last.returncode == 0
    runs = run_yaml.parent / "runs" / "e2e"
    first, second = what_is_left(runs / "whole"), what_is_left(runs / "broken")
    assert second["batches"] == first["batches"]
    assert len(second["batches"]) == STEPS
    assert second["records"] == first["records"]
    assert [name for name in first["files"] if first["files"][name] != second["files"].get(name)] == []
