"""The plot shows metrics.jsonl, and only panels with data."""

import json
import struct
import subprocess
import sys
import pytest
from areal_lite.errors import ConfigError
from areal_lite.tools.inspect.plot import metrics_figure, plot_metrics
from areal_lite.trainer.metrics import MetricsWriter

RL_STEP = {
    "train/reward_mean": 0.25,
    "train/loss": 0.01,
    "train/reward_std": 0.5,
    "train/reward_group_std": 0.25,
    "train/entropy": 2.0,
    "train/grad_norm": 1.5,
    "train/clip_fraction": 0.1,
    "train/clip_fraction_high": 0.02,
    "train/learning_rate": 1e-5,
    "train/response_length_mean": 12.0,
    "train/response_length_max": 16.0,
    "train/approx_kl": 0.001,
    "train/staleness_mean": 0.5,
    "train/staleness_max": 1.0,
    "train/seconds_forward": 1.5,
    "train/seconds_proximal": 0.0,
    "train/seconds_step": 1.6,
    "timing/rollout_wait_s": 2.0,
    "timing/step_s": 4.0,
}


def write_run(folder, *records):
    """Write ``(step, metrics)`` as a run does."""
    writer = MetricsWriter(folder)
    for step, metrics in records:
        writer.write(step, metrics)
    return folder


def rl_run(folder):
    return write_run(
        folder,
        (0, {"eval/reward": 0.1}),
        (1, RL_STEP),
        (2, RL_STEP | {"train/reward_mean": float("nan"), "timing/rollout_wait_s": 1.0}),
        (2, {"eval/reward": 0.9}),
    )


def panels(figure):
    return {axes.get_title(): axes for axes in figure.axes}


def curves(axes):
    return {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.lines}


def test_each_kind_of_metric_gets_a_panel_with_its_unit(tmp_path):
    found = panels(metrics_figure(rl_run(tmp_path / "exp" / "one")))
    assert {title: axes.get_ylabel() for title, axes in found.items()} == {
        "Reward": "reward",
        "Loss": "loss",
        "Response length": "tokens",
        "KL divergence": "nats per token",
        "Staleness": "policy versions",
        "Entropy": "nats",
        "Gradient norm": "before clipping",
        "Clip fraction": "share of tokens",
        "Reward deviation": "reward",
        "Learning rate": "per step",
        "Step time": "seconds",
    }
    assert all(axes.get_xlabel() == "training step" for axes in found.values())
    assert curves(found["Reward"]) == {"train": [(1, 0.25)], "eval": [(0, 0.1), (2, 0.9)]}
    assert curves(found["Clip fraction"]) == {
        "all": [(1, 0.1), (2, 0.1)],
        "at the upper bound": [(1, 0.02), (2, 0.02)],
    }
    assert curves(found["Response length"]) == {"mean": [(1, 12), (2, 12)], "max": [(1, 16), (2, 16)]}


def test_phase_times_are_stacked_without_totals_and_idle_phases(tmp_path):
    stack = panels(metrics_figure(rl_run(tmp_path)))["Step time"]
    assert [area.get_label() for area in stack.collections] == ["forward", "rollout wait"]
    assert stack.collections[-1].get_datalim(stack.transData).ymax == 3.5  # 1.5 + 2.0 at step 1


def test_a_single_step_is_visible_and_not_hidden_by_the_legend(tmp_path):
    figure = metrics_figure(write_run(tmp_path, (1, RL_STEP)))
    figure.draw_without_rendering()
    stack = panels(figure)["Step time"]
    assert stack.collections[0].get_datalim(stack.transData).intervalx.tolist() == [0.5, 1.5]
    drawn = stack.collections[-1].get_datalim(stack.transData).transformed(stack.transData)
    assert stack.get_legend().get_window_extent().ymin >= drawn.ymax


def test_an_sft_run_gets_only_panels_with_data(tmp_path):
    first = {"train/loss": 2.0, "train/tokens_per_second": 100.0}
    run = write_run(tmp_path, (1, first), (2, {"train/loss": 1.0}), (2, {"eval/loss": 1.5}))
    found = panels(metrics_figure(run))
    assert list(found) == ["Loss", "Trainer throughput"]
    assert curves(found["Loss"]) == {"train": [(1, 2.0), (2, 1.0)], "eval": [(2, 1.5)]}


def test_several_runs_share_panels_except_for_times(tmp_path):
    found = panels(metrics_figure(rl_run(tmp_path / "exp" / "a"), rl_run(tmp_path / "exp" / "b")))
    assert set(curves(found["Staleness"])) == {f"exp/{run}: {label}" for run in "ab" for label in ("mean", "max")}
    assert {"Step time, exp/a", "Step time, exp/b"} < set(found)


def test_a_running_run_is_plotted_up_to_its_last_whole_line(tmp_path):
    run = rl_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/rew')
    assert curves(panels(metrics_figure(run))["Reward"])["train"] == [(1, 0.25)]


def test_the_command_writes_a_png_of_two_columns(tmp_path):
    run = rl_run(tmp_path / "run")
    command = [sys.executable, "-m", "areal_lite", "plot", str(run), str(run), "--out", "curves.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("curves.png\n", "", 0)
    content = (tmp_path / "curves.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (2 * 6 * 150, 6 * 3.2 * 150 // 1)  # eleven panels


def test_one_run_is_plotted_into_its_folder_and_several_need_an_output_path(tmp_path):
    run = write_run(tmp_path / "run", (1, {"train/loss": 2.0}))
    assert plot_metrics(run) == run / "metrics.png"
    assert (run / "metrics.png").exists()
    with pytest.raises(ConfigError, match="plot of 2 runs needs a file name: use --out"):
        plot_metrics(run, run)


def test_a_run_without_data_or_folder_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 2.0, "train/reward_mean": None}) + "\n")
    with pytest.raises(ConfigError, match=r"no line has train/reward_mean or eval/reward or train/loss"):
        plot_metrics(tmp_path)
    with pytest.raises(ConfigError, match=r"metrics.jsonl: No such file"):
        plot_metrics(tmp_path / "none")


@pytest.mark.parametrize("name", ["none/here.png", "picture.metrics"])
def test_a_plot_that_cannot_be_written_is_an_error(tmp_path, name):
    with pytest.raises(ConfigError, match=r"cannot be written: .* Use a \.png in an existing folder"):
        plot_metrics(rl_run(tmp_path), out=tmp_path / name)


def test_a_missing_matplotlib_is_named_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        plot_metrics(rl_run(tmp_path))
