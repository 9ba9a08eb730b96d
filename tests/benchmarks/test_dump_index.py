"""The benchmark of the index at its smallest: every figure is there, and counts are whole."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/dump_index.py"


def test_the_smallest_size_gives_every_figure():
    done = subprocess.run([sys.executable, str(SCRIPT), "--smoke"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["build"]["episodes"] == figures["open"]["episodes"] == 2000
    assert figures["open"]["pages without count"] == []
    assert len(figures["open"]["page_s"]) >= 10
