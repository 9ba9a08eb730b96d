"""``await areal_lite.train(...)`` works inside a running loop, shows progress, and stops when cancelled."""

from __future__ import annotations
import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
import pytest
import areal_lite
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import ExperimentConfig
from areal_lite.runs import stopping
from areal_lite.tools import notebook

FEW = ["eval_dataset=null", "save_model=false", "rollout.dump_to_file=false"]


def test_a_run_leaves_the_loop_free_and_prints_its_steps(served_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def cell() -> tuple[Any, int]:
        run = asyncio.ensure_future(areal_lite.train(served_yaml, "trainer.total_steps=2", *FEW))
        turns = 0
        while not run.done():
            await asyncio.sleep(0.01)
            turns += 1
        return run.result(), turns

    summary, turns = asyncio.run(cell())
    assert summary.steps == 2
    assert turns > 20
    assert capsys.readouterr().out.count("reward ") == 2


def test_a_cancelled_cell_stops_the_run_with_a_checkpoint(sft_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(sft_yaml, ["trainer.total_steps=100000"], root=ExperimentConfig)

    async def cell() -> None:
        loop, stepped = asyncio.get_running_loop(), asyncio.Event()
        monkeypatch.setattr(
            notebook.TrainingProgress, "on_step", lambda self, step, metrics: loop.call_soon_threadsafe(stepped.set)
        )
        run = asyncio.ensure_future(areal_lite.train(config))
        await stepped.wait()
        run.cancel()
        await run

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cell())
    assert list((config.run_dir / "checkpoints").glob("step_*"))
    assert not stopping._signal  # another run may start


def test_a_notebook_shows_progress_and_curves(sft_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    displays: list[Any] = []

    class Display:
        def __init__(self, shown: Any) -> None:
            self.history = [shown]

        def update(self, shown: Any) -> None:
            asyncio.get_running_loop()  # on the loop, where IPython knows the cell
            self.history.append(shown)

    def display(shown: Any, *, display_id: bool) -> Display:
        displays.append(Display(shown))
        return displays[-1]

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.version_info = (9, 0)  # type: ignore[attr-defined]  # matplotlib reads it
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    module.HTML, module.Image, module.display = str, lambda data: data, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a kernel does
    asyncio.run(areal_lite.train(sft_yaml, "trainer.total_steps=2", "save_model=false"))
    progress, curves = (display.history for display in displays)
    assert progress[0] == "starting ..."
    assert '<progress value="2" max="2">' in progress[-1]
    assert "step     2  loss" in progress[-1]
    assert "\x1b" not in progress[-1]
    assert curves[-1].startswith(b"\x89PNG")


def test_overrides_of_a_loaded_config_are_refused(run_yaml: Path) -> None:
    with pytest.raises(ValueError, match="use dataclasses.replace"):
        asyncio.run(areal_lite.train(load_config(run_yaml), "seed=2"))


def test_supervised_training_takes_no_workflow(sft_yaml: Path) -> None:
    config = load_config(sft_yaml, root=ExperimentConfig)
    with pytest.raises(ValueError, match="the config is SFTConfig, which has no workflow"):
        asyncio.run(areal_lite.train(config, workflow="my.Workflow"))
