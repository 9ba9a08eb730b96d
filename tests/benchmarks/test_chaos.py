"""The chaos benchmark at its smallest: every invariant holds while servers, episodes, disk and trainer fail."""

import json
import subprocess
import sys
from pathlib import Path

CHAOS = Path(__file__).parents[2] / "benchmarks/chaos.py"


def test_faults_of_every_kind_break_no_invariant(tmp_path):
    command = [sys.executable, str(CHAOS), "--smoke", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "stderr.txt").read_text()

    figures = json.loads(done.stdout)
    assert figures["episodes"] > 500
    assert set(figures["faults that lasted"].values()) == {1}
    seen = [kind for kind, count in figures["faults of replies"].items() if not count.startswith("0 ")]
    assert len(seen) > 5
    assert sum(figures["misdeeds of episodes"].values()) > 5
