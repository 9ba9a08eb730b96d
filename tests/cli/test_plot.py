"""The learning curve is a picture of what metrics.jsonl says."""

import json
import sys

import pytest

from areal_lite.errors import ConfigError
from areal_lite.inspect.plot import plot_metrics


def write(tmp_path, *records):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_rewards_and_held_out_points_become_a_png(tmp_path):
    run = write(
        tmp_path,
        {"step": 0, "time": 1.0, "eval/reward": 0.1},
        {"step": 1, "time": 2.0, "train/reward_mean": 0.2},
        {"step": 2, "time": 3.0, "train/reward_mean": None},
    )
    picture = plot_metrics(run)
    assert picture == run / "reward.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_rewards_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"no line has train/reward_mean or eval/reward"):
        plot_metrics(write(tmp_path, {"step": 1, "time": 2.0}))
    with pytest.raises(ConfigError, match=r"metrics.jsonl: No such file"):
        plot_metrics(tmp_path / "none")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"areal-lite\[examples\]"):
        plot_metrics(tmp_path)
