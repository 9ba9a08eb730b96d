"""Console output of a training run: printed once for any number of ranks; a resumed run has no "before"."""

from __future__ import annotations
from io import StringIO
from pathlib import Path
import pytest
from rich.console import Console
from areal_lite.runs.evaluation import Evaluation
from areal_lite.runs.training_run import StepMetrics, Summary
from areal_lite.servers.pool.server_pool import Server
from areal_lite.tools.run.progress import TrainingProgress, server_table, summary_table


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), ("0", 1), ("1", 0)])
def test_only_the_first_rank_prints(
    rank: str | None, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with TrainingProgress(4) as progress:
        progress.on_step(0, {"eval/reward": 0.5, "eval/episodes": 4.0, "eval/seconds": 1.0})
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_the_bar_of_a_resumed_run_starts_at_its_first_step() -> None:
    """V32"""
    shown = StringIO()
    with TrainingProgress(5, console=Console(file=shown, force_terminal=True, width=120)) as progress:
        progress.on_step(3, {"eval/reward": 0.5, "eval/episodes": 4.0, "eval/seconds": 1.0})
    assert "3/5" in shown.getvalue()
    assert "0/5" not in shown.getvalue()


def test_without_held_out_rows_the_summary_is_one_line() -> None:
    summary = Summary[Evaluation](run_dir=Path("runs"), steps=2, seconds=3.0, before=None, after=None, model_dir=None)
    assert summary_table(summary) == "2 training steps in 3 s"


@pytest.mark.parametrize("resumed", [True, False])
def test_the_table_of_a_resumed_run_has_no_before(resumed: bool) -> None:
    after = Evaluation(reward=0.75, episodes=4, failed=1, seconds=1.0)
    before = None if resumed else Evaluation(reward=0.25, episodes=3, failed=2, seconds=1.0)
    summary = Summary(run_dir=Path("runs"), steps=2, seconds=3.0, before=before, after=after, model_dir=None)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(summary_table(summary))
    rows = [line.split() for line in shown.get().splitlines() if "held-out" in line or "failed" in line]
    shown_values = [[word for word in row if word not in "│|"][-2:] for row in rows]
    first = ["-", "-", "-"] if resumed else ["0.250", "3", "2"]
    assert shown_values == [list(pair) for pair in zip(first, ["0.750", "4", "1"], strict=True)]


STEP = {
    "train/reward_mean": 0.5, "train/loss": 0.1, "timing/step_s": 1.0, "timing/rollout_wait_s": 0.5,
    "timing/weight_update_s": 0.1,
}  # fmt: skip


def test_a_step_shows_failed_and_retried_work_with_the_top_cause() -> None:
    shown = StringIO()
    with TrainingProgress(4, console=Console(file=shown, width=200)) as progress:
        progress.on_step(1, {**STEP, "rollout/failed_episodes": 0.0, "rollout/retried_requests": 0.0})
        record = StepMetrics({**STEP, "rollout/failed_episodes": 3.0, "rollout/retried_requests": 7.0})
        record.top_cause = "engine, ServerError: HTTP 503"
        progress.on_step(2, record)
    first, second = (line for line in shown.getvalue().splitlines() if line.startswith("step"))
    assert first.endswith("weights 0.1)")
    assert second.endswith("failed 3 (most: engine, ServerError: HTTP 503)  retried 7")


def test_a_line_in_a_pipe_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    record = StepMetrics({"train/reward_mean": 0.5, "train/loss": 0.25, "rollout/failed_episodes": 2.0})
    record.update({f"timing/{name}_s": 1.0 for name in ("step", "rollout_wait", "weight_update")})
    record.top_cause = "agent, KeyError: " + "no such column " * 20
    with TrainingProgress(4) as progress:
        progress.on_step(1, record)
    (line,) = capsys.readouterr().out.splitlines()
    assert record.top_cause.rstrip() in line


def test_the_table_at_the_end_has_a_row_for_each_server() -> None:
    figures = {"servers/0/requests": 12.0, "servers/0/latency_p50_s": 0.25, "servers/1/requests": 3.0}
    table = server_table({**figures, "servers/1/latency_p50_s": 1.5, "train/loss": 1.0}, ["a:1", "b:2"])
    assert table is not None
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table)
    rows = [line.split() for line in captured.get().splitlines() if "a:1" in line or "b:2" in line]
    assert [[word for word in row if word not in "│|"] for row in rows] == [["a:1", "12", "0.25"], ["b:2", "3", "1.50"]]
    assert server_table({"train/loss": 1.0}, []) is None


def test_the_table_of_servers_fits_80_columns() -> None:
    figures = Server("10.11.12.13:30000", 0).metrics() | {"tokens": 98765432.0, "latency_p95_s": 123.45}
    table = server_table({f"servers/0/{name}": value for name, value in figures.items()}, ["10.11.12.13:30000"])
    assert table is not None
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    words = captured.get().split()
    assert {"10.11.12.13:30000", "version", "requests", "failures", "98765432", "123.45"} <= {*words}


def test_the_table_of_servers_names_a_router_and_the_servers_behind_it() -> None:
    figures = {f"servers/{name}/requests": 1.0 for name in ("0", "1", "router")}
    names = [list(server_table(figures, addresses).columns[0].cells) for addresses in (["a:1", "b:2"], ["r:1"])]  # type: ignore[union-attr]
    assert names == [["a:1", "b:2", "router"], ["0", "1", "router"]]
    for started, name in ((None, "embedded"), ("sglang", "sglang")):
        table = server_table({"servers/0/requests": 1.0}, [], started)
        assert table is not None and list(table.columns[0].cells) == [name]
