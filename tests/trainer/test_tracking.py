"""V28: trackers get project, name, the whole config and every metric; they may fail later, but not at the start."""

from __future__ import annotations
import logging
import sqlite3
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.run_config import RunConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.errors import ConfigError
from areal_lite.trainer.metrics import MetricsWriter, Tracker, Tracking, start_tracking


def config(*tracking: Any) -> RunConfig:
    return RunConfig(
        experiment_name="exp",
        trial_name="one",
        model_path="models/tiny",
        workflow="my.Agent",
        workflow_kwargs={"api_key": "hunter2"},
        train_dataset=DatasetConfig(path="rows.jsonl"),
        trainer=TrainerConfig(total_steps=2, learning_rate=1e-5),
        tracking=list(tracking),
    )


def run(run_dir: Path, tracker: str, *steps: int) -> None:
    """Log a loss at ``steps``, resuming from the step before the first."""
    with start_tracking(config(tracker), run_dir, last_step=steps[0] - 1) as tracking:
        writer = MetricsWriter(run_dir, last_step=steps[0] - 1, tracking=tracking)
        for step in steps:
            writer.write(step, {"train/loss": step / 2})
            writer.write(step, {"eval/reward": 1.0})
    assert not tracking.failures


def test_tensorboard_shows_the_config_and_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, "tensorboard", 1, 2, 3)
    run(tmp_path, "tensorboard", 2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0)]
    (shown,) = {event.tensor_proto.string_val[0] for event in events.Tensors("config/text_summary")}
    assert b"learning_rate: 1.0e-05" in shown
    assert b"hunter2" not in shown


def test_wandb_resumes_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(tmp_path, "wandb", 1, 2)
    run(tmp_path, "wandb", 2)
    wandb.teardown()  # its process writes the last bytes after a run has ended
    run_id = (tmp_path / "wandb_run_id").read_text()
    files = sorted((tmp_path / "wandb").rglob("*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    for file in files:
        content = file.read_bytes()
        assert b"train/loss" in content and b"learning_rate" in content
        assert b"hunter2" not in content


class FakeWandB:
    """The package's functions that a run uses."""

    Settings = dict

    def __init__(self, mode: str, has_key: bool) -> None:
        self.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode=mode))
        self.login = lambda *, prompt: has_key or prompt
        self.calls: list[Any] = []
        self.options: list[dict[str, Any]] = []

    def init(self, **options: Any) -> FakeWandB:
        self.options.append(options)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.calls.append((name, step_metric))

    def log(self, metrics: Mapping[str, float]) -> None:
        self.calls.append(metrics)

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize(("mode", "has_key"), [("online", True), ("offline", False)])
def test_wandb_gets_the_step_as_a_metric_and_the_same_id_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, has_key: bool
) -> None:
    wandb = FakeWandB(mode, has_key)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run(tmp_path, "wandb", 1)
    run(tmp_path, "wandb", 2)
    for step, calls in ((1, wandb.calls[:4]), (2, wandb.calls[4:])):
        loss, reward = {"step": step, "train/loss": step / 2}, {"step": step, "eval/reward": 1.0}
        assert calls == [("*", "step"), loss, reward, "finish"]
    first, second = wandb.options
    assert first == second
    assert (first["id"], first["resume"]) == ((tmp_path / "wandb_run_id").read_text(), "allow")
    assert (first["project"], first["name"]) == ("exp", "one")


def test_wandb_online_without_a_key_fails_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB("online", False))
    with pytest.raises(ConfigError, match="no API key: run `wandb login`, or set WANDB_MODE=offline"):
        start_tracking(config("wandb"), tmp_path)


def test_wandb_without_a_key_fails_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    wandb.teardown()
    with pytest.raises(ConfigError, match="no API key: run `wandb login`, or set WANDB_MODE=offline"):
        start_tracking(config("wandb"), tmp_path)


def test_trackio_resumes_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read at import
    pytest.importorskip("trackio")
    run(tmp_path, "trackio", 1)
    run(tmp_path, "trackio", 2)
    database = sqlite3.connect(tmp_path / "exp.db")
    rows = database.execute("select run_id, run_name, step, metrics from metrics").fetchall()
    database.close()
    assert len({run_id for run_id, *_ in rows}) == 1
    assert {(name, step) for _, name, step, _ in rows} == {("one", 1), ("one", 2)}


def test_trackio_gets_each_step_and_resumes_only_a_run_that_has_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    started = SimpleNamespace(
        log=lambda metrics, step: calls.append((step, metrics)), finish=lambda: calls.append("finish")
    )

    def init(*, project: str, name: str, config: Any, resume: str, embed: bool) -> SimpleNamespace:
        calls.append((project, name, resume, embed))
        return started

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    run(tmp_path, "trackio", 1)
    run(tmp_path, "trackio", 2)
    start_tracking(config("trackio"), tmp_path)
    assert calls == [
        ("exp", "one", "never", False), (1, {"train/loss": 0.5}), (1, {"eval/reward": 1.0}), "finish",
        ("exp", "one", "allow", False), (2, {"train/loss": 1.0}), (2, {"eval/reward": 1.0}), "finish",
        ("exp", "one", "never", False),
    ]  # fmt: skip


def test_a_tracker_is_closed_if_the_next_one_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandB("offline", False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="pip install trackio"):
        start_tracking(config("wandb", "trackio"), tmp_path)
    assert wandb.calls[-1] == "finish"


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")],
)
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {name}, or leave {name} out"):
        start_tracking(config(name), tmp_path)


def test_a_tracker_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where the folder goes")
    with pytest.raises(ConfigError, match=r"tensorboard cannot start: FileExistsError.*leave tensorboard out"):
        start_tracking(config("tensorboard"), tmp_path)


def unreachable(*_: object) -> None:
    raise ConnectionError("no route to host")


def test_a_failing_tracker_is_logged_once_and_stops_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[int] = []
    closed: list[bool] = []
    kept = Tracker(lambda step, _: steps.append(step), lambda: closed.append(True))
    with (
        caplog.at_level(logging.WARNING),
        Tracking({"far": Tracker(unreachable, unreachable), "near": kept}) as tracking,
    ):
        writer = MetricsWriter(tmp_path, tracking=tracking)
        for step in (1, 2, 3):
            writer.write(step, {"train/loss": 0.5})
            assert len(caplog.messages) == 1
    assert tracking.failures == {"far": 4}
    assert steps == [1, 2, 3] and closed
    assert [message.split(";")[0] for message in caplog.messages] == [
        "far failed, and the run continues: ConnectionError: no route to host",
        "far failed 4 times in this run",
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
