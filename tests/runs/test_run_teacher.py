"""The teacher of a run: where it is refused, and that batches which one scored are not taken for another's."""

from __future__ import annotations
import json
from pathlib import Path
import pytest
import torch
from areal_lite.config.run_config import RunConfig
from areal_lite.config.trainer_config import KLConfig, TeacherConfig, TrainerConfig
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.errors import ConfigError
from areal_lite.runs import rollout_driver


def config(folder: Path, address: str) -> RunConfig:
    kl = KLConfig(coef=1.0, teacher=TeacherConfig(addresses=[address]))
    return RunConfig(
        experiment_name="e",
        model_path=str(folder),
        train_dataset={"path": "rows.jsonl"},
        trainer=TrainerConfig(total_steps=1, learning_rate=1e-5, kl=kl),
        rollout_cache=str(folder / "cache"),
    )


def test_a_model_that_reads_images_has_no_teacher(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    with pytest.raises(ConfigError, match="scores tokens alone, and .* reads images: remove it"):
        rollout_driver.make_teacher(config(tmp_path, "127.0.0.1:1"))


def test_cached_batches_belong_to_the_teacher_that_scored_them(tmp_path: Path) -> None:
    def cached(address: str) -> DataProto:
        cache = rollout_driver._batch_cache(config(tmp_path, address), baselines=False)
        assert cache is not None
        return cache.batch(1, lambda: DataProto.from_single_dict({"rewards": torch.ones(2)}))

    cached("127.0.0.1:1")
    cached("127.0.0.1:1")
    with pytest.raises(ConfigError, match="made under another config: .*teacher"):
        cached("127.0.0.1:2")
