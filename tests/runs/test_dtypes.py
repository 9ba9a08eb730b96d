"""A run that trains records the dtypes it computes in; rollouts alone leave an open one to their server."""

from __future__ import annotations
import dataclasses
from pathlib import Path
from typing import Any
import pytest
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.run_config import RolloutConfig, RunConfig
from areal_lite.config.supervised_config import SFTConfig, SFTDatasetConfig, SFTTrainerConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.models import policy_model
from areal_lite.processes.place import here
from areal_lite.runs import engine_stack
from areal_lite.runs.training_run import with_dtypes

NAMES: dict[str, Any] = {"experiment_name": "e", "model_path": "m"}


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_recorded_as_what_it_is_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, dtype: str
) -> None:
    monkeypatch.setattr(policy_model, "has_bfloat16", lambda: has_bfloat16)
    trainer = TrainerConfig(total_steps=1, learning_rate=1.0, device="cpu")
    config = RunConfig(train_dataset=DatasetConfig(path="rows.jsonl"), trainer=trainer, **NAMES)
    resolved = with_dtypes(config)
    assert (resolved.trainer.dtype, resolved.server.dtype) == (dtype, dtype)
    given = dataclasses.replace(config, server=dataclasses.replace(config.server, dtype="float16"))
    assert with_dtypes(given).server.dtype == "float16"
    answers = SFTConfig(
        train_dataset=SFTDatasetConfig(path="rows.jsonl", max_length=8),
        trainer=SFTTrainerConfig(batch_size=1, learning_rate=1.0, device="cpu"),
        **NAMES,
    )
    assert with_dtypes(answers).trainer.dtype == dtype


@pytest.mark.parametrize(
    ("trainer", "server", "passed"),
    [("auto", "auto", "auto"), ("float32", "auto", "float32"), ("bfloat16", "float32", "float32")],
)
def test_a_server_gets_the_dtype_that_the_config_gives(
    monkeypatch: pytest.MonkeyPatch, trainer: str, server: str, passed: str
) -> None:
    config: Any = RolloutConfig(train_dataset=DatasetConfig(path="rows.jsonl"), **NAMES)
    config = dataclasses.replace(
        config,
        trainer=dataclasses.replace(config.trainer, dtype=trainer),
        server=dataclasses.replace(config.server, dtype=server),
    )
    made: list[Any] = []
    monkeypatch.setattr(engine_stack, "make_servers", lambda settings, *_, **__: made.append(settings) or [])
    engine_stack._servers(config, Path("logs"), here, lambda: None)
    assert [settings.dtype for settings in made] == [passed]
