"""Every benchmark at its smallest size: it ends, and its figures are numbers; and what some of them check."""

import json
import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
import pytest
from benchmarks.report import Figure, of_limit, table
from benchmarks.run_all import SCRIPTS
from tests.fixtures.tiny_model import build_tiny_model

ROOT = Path(__file__).parents[2]
WITH_OWN_TEST = {"chaos", "dump_index", "plan", "weight_update"}
OWN_PROCESS = {"agent_streams", "branches", "logits_memory", "growth", "chaos"}
"""Three fork, two leave pipes to their end."""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run a benchmark, in this process where possible; return its figures by name, and its output."""

    def run(name, *options):
        path = tmp_path / "figures.json"
        argv = [str(ROOT / f"benchmarks/{name}.py"), "--smoke", "--json", str(path), *map(str, options)]
        if name in OWN_PROCESS:
            subprocess.run([sys.executable, *argv], cwd=ROOT, check=True)
        else:
            monkeypatch.setattr(sys, "argv", argv)
            assert not import_module(f"benchmarks.{name}").main()
        report = json.loads(path.read_text())
        figures = {figure["figure"]: SimpleNamespace(**figure) for figure in report["figures"]}
        assert report["benchmark"] == name
        assert report["commit"]
        assert "--smoke" in report["command"]
        assert report["machine"]["cores"] == len(os.sched_getaffinity(0))
        assert 0 < len(figures) == len(report["figures"])
        for figure in figures.values():
            for value in (figure.value, figure.ratio or 1, figure.limit or 1):
                assert math.isfinite(value)
                assert value > 0, figure
        return figures, capfd.readouterr().out

    return run


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - WITH_OWN_TEST))
def test_a_benchmark_ends_and_its_figures_are_numbers(run, name):
    run(name)


def test_all_benchmarks_are_run():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "make_parser(" in path.read_text()}
    assert scripts - {"report"} == SCRIPTS.keys()


def test_faults_of_every_kind_break_no_invariant(run, tmp_path):
    _, output = run("chaos", "--keep", tmp_path)
    figures = json.loads(output)
    assert figures["episodes"] > 500
    assert set(figures["faults that lasted"].values()) == {1}
    seen = [kind for kind, count in figures["faults of replies"].items() if not count.startswith("0 ")]
    assert len(seen) > 5
    assert sum(figures["misdeeds of episodes"].values()) > 5
    assert 0 < figures["effective training time"] < figures["effective training time of the capacity left"]
    assert figures["causes named"] > 0.85, figures["causes not named"]


def test_the_index_of_dumps_counts_every_episode(run):
    _, output = run("dump_index")
    figures = json.loads(output)
    assert figures["build"]["episodes"] == figures["open"]["episodes"] == 2000
    assert len(figures["open"]["pages without count"]) <= 1  # of a machine that stood still for 0.15 s
    assert len(figures["open"]["page_s"]) >= 10


def test_a_plan_and_its_run_are_compared(run):
    figures, output = run("plan")
    for name in ("tokens trained", "tokens sampled", "memory_bytes trainer", "disk_bytes checkpoints"):
        assert abs(figures[f"checkpoints: {name}"].ratio - 1) <= 0.2
    assert "checkpoints: seconds total" in figures
    assert "figures of 1 runs are good" in output


def test_every_way_updates_a_server_and_no_token_is_lost(run, tmp_path):
    figures, output = run("weight_update")
    rows = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| embedded |")]
    lost = {(way, pause): int(lost) for _, way, pause, *_, lost, _ in rows}
    ways = ("disk", "memory", "broadcast", "adapter")
    assert lost == {(way, pause): 0 for way in ways for pause in ("abort", "keep")}
    model = build_tiny_model(tmp_path / "same")
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    for way, pause in lost:
        size = figures[f"embedded, {way}, {pause}: megabytes"].value * 1e6
        assert size < 0.9 * weights if way == "adapter" else 0.9 * weights < size < 1.1 * weights


def test_the_table_shows_ratio_and_limit():
    figures = [
        {"figure": "decoding", "value": 400.0, "unit": "tokens/s", "ratio": 0.8, "limit": 1600.0},
        {"figure": "step", "value": 4.0, "unit": "s", "ratio": None, "limit": 1.0},
    ]
    machine = {"cpu": "Xeon", "cores": 2, "load": 0.3}
    lines = table([{"benchmark": "b", "commit": "abc", "machine": machine, "figures": figures}]).splitlines()
    assert lines[0] == "| benchmark | figure | value | ratio | limit | machine | commit |"
    where = "Xeon, 2 cores, load 0.3 | abc |"
    assert lines[2] == f"| b | decoding | 400 tokens/s | 0.80 | 0.25 of the limit 1,600 | {where}"
    assert lines[3] == f"| b | step | 4 s |  | 0.25 of the limit 1 | {where}"
    assert of_limit(Figure("a", 1.0, "s")) == ""
