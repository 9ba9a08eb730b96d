"""The benchmark of plans at its smallest: every figure is compared, and those without time agree."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/plan.py"


def test_a_plan_and_its_run_are_compared(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--smoke", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = {row["figure"]: row for row in json.loads(figures.read_text())}
    for figure in ("tokens trained", "tokens sampled", "memory_bytes trainer", "disk_bytes checkpoints"):
        assert rows[figure]["good"], rows[figure]
    assert rows["seconds total"]["predicted"] > 0
    assert "figures of 1 runs are good" in done.stdout
