"""A run that skipped most of its updates says so at its end."""

from __future__ import annotations
from pathlib import Path
from typing import Any
import pytest
from areal_lite.config.loader import load_config
from areal_lite.config.supervised_config import SFTConfig
from areal_lite.runs.supervised_run import run_supervised
from areal_lite.trainer.supervised.supervised_trainer import SFTTrainer


@pytest.mark.parametrize(("skipped", "warns"), [(2, True), (1, False)])
def test_a_run_warns_if_it_skipped_most_of_its_updates(
    skipped: int, warns: bool, sft_yaml: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = SFTTrainer.train_step

    def train_step(self: Any, batch: Any) -> dict[str, float]:
        return real(self, batch) | {"skipped_updates": float(self.learner.steps_done <= skipped)}

    monkeypatch.setattr(SFTTrainer, "train_step", train_step)
    run_supervised(load_config(sft_yaml, ["trainer.total_steps=3", "save_model=false"], root=SFTConfig))
    says = "2 of 3 updates were skipped because loss or gradient was not finite, so the model hardly learned: lower"
    assert (says in caplog.text) is warns
