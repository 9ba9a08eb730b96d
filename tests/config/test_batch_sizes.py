"""verl's names of batch sizes: what they set, and where they contradict ours."""

from __future__ import annotations
from pathlib import Path
import pytest
from areal_lite.config.loader import load_config
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.config.run_config import RunConfig
from areal_lite.errors import ConfigError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine


def test_groups_generated_at_once_may_exceed_the_batch() -> None:
    config = InferenceEngineConfig(addresses=["127.0.0.1:1"], consumer_batch_size=4, gen_batch_size=6)
    gate = RemoteInfEngine(config)._executor.gate
    started = 0
    while gate.may_start_ahead(started):
        gate.start(training=True)
        started += 1
    assert started == 6


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ("{consumer_batch_size: 4, gen_batch_size: 3}", "set max_concurrent_rollouts: 3"),
        ("{gen_batch_size: 3, over_sampling_groups: 1}", "both set the same thing, so remove one"),
        ("{train_batch_size: 3}", "the rows of a training batch are rollout.consumer_batch_size"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(tmp_path: Path, rollout: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, rollout), root=RunConfig)


def test_a_run_has_no_loader_workers_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'dataloader_num_workers': rows are read and prepared while others generate"):
        load_config(written(tmp_path, "{}"), ["train_dataset.dataloader_num_workers=4"], root=RunConfig)


def written(folder: Path, rollout: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        "experiment_name: e\nmodel_path: m\nworkflow: w.W\ntrain_dataset: {path: rows}\n"
        f"trainer: {{total_steps: 1, learning_rate: 1.0}}\nrollout: {rollout}\n"
    )
    return path
