"""The benchmark of weight updates at its smallest: every way works, and no answer loses a token."""

import json
import subprocess
import sys
from pathlib import Path

from tests.fixtures.tiny_model import build_tiny_model

BENCHMARK = Path(__file__).parents[2] / "benchmarks/weight_update.py"


def test_every_way_updates_a_server_and_no_token_is_lost(tmp_path):
    model, figures = build_tiny_model(tmp_path / "model"), tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--smoke", "--model", str(model), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(figures.read_text())
    assert {(row["way"], row["pause"]) for row in rows} == {
        (way, pause) for way in ("disk", "memory", "broadcast", "adapter") for pause in ("abort", "keep")
    }
    assert all(row["tokens_lost"] == 0 for row in rows)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    for row in rows:
        size = row["megabytes"] * 1e6
        assert size < 0.9 * weights if row["way"] == "adapter" else 0.9 * weights < size < 1.1 * weights
    assert done.stdout.count("| embedded |") == len(rows)
