"""Checkpoints are whole or not there, and what is loaded is bit for bit what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lite.api.config import TrainerConfig
from areal_lite.errors import CheckpointError
from areal_lite.trainer.checkpoint import checkpoint_step, find_checkpoint, load_checkpoint, save_checkpoint
from areal_lite.trainer.policy_trainer import PolicyTrainer
from tests.trainer.training_data import drawn_batch, training_batch


def make_trainer(model: Path) -> PolicyTrainer:
    config = TrainerConfig(
        total_steps=10, learning_rate=1e-2, lr_schedule="cosine", dtype="float32", device="cpu"
    )
    return PolicyTrainer(config, model_path=str(model), seed=3)


def save(trainer: PolicyTrainer, root: Path, step: int, keep: int = 2) -> Path:
    def write_rest(folder: Path) -> None:
        (folder / "data").mkdir()
        (folder / "data" / "state.json").write_text("{}")

    return save_checkpoint(trainer, root, step, write_rest=write_rest, keep=keep)


@pytest.mark.parametrize("kind", ["tiny", "untied"])
def test_training_goes_on_bit_for_bit(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    batches = [training_batch(drawn_batch(seed)) for seed in range(4)]
    whole = make_trainer(model)
    for step, batch in enumerate(batches):
        whole.train_step(batch, version=step)
        if step == 1:
            folder = save(whole, tmp_path, 2)
    resumed = make_trainer(model)
    load_checkpoint(resumed, folder)
    for step, batch in enumerate(batches[2:], start=2):
        resumed.train_step(batch, version=step)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_checkpoint_holds_an_ordinary_model(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny)
    folder = save(trainer, tmp_path, 1)
    again = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    assert again.dtype == torch.float32
    assert checkpoint_step(folder) == 1
    assert (folder / "data" / "state.json").read_text() == "{}"


def test_the_newest_are_kept_and_found(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny)
    assert find_checkpoint(tmp_path, "auto") is None
    for step in (1, 2, 11):
        save(trainer, tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000011"]
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "step_00000011"
    assert find_checkpoint(tmp_path, "never") is None
    assert find_checkpoint(tmp_path, str(tmp_path / "step_00000002")) == tmp_path / "step_00000002"


@pytest.mark.parametrize(
    "file", ["trainer.json", "optimizer.safetensors", "model/model.safetensors", "data/state.json"]
)
def test_a_changed_or_missing_file_is_found_and_never_passed_over(
    file: str, tiny: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny)
    for step in (1, 2):
        save(trainer, tmp_path, step)
    path = tmp_path / "step_00000002" / file
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        CheckpointError, match="newest checkpoint.*changed or cut off.*go on from step_00000001"
    ):
        find_checkpoint(tmp_path, "auto")
    path.unlink()
    with pytest.raises(CheckpointError, match="is not whole"):
        find_checkpoint(tmp_path, "auto")


def test_a_failed_write_leaves_the_older_checkpoint(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny)
    save(trainer, tmp_path, 1)

    def write_rest(folder: Path) -> None:
        raise KeyError("the data source is broken")

    with pytest.raises(KeyError):
        save_checkpoint(trainer, tmp_path, 2, write_rest=write_rest, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_a_checkpoint_of_another_model_is_refused(tiny: Path, untied: Path, tmp_path: Path) -> None:
    folder = save(make_trainer(tiny), tmp_path, 1)
    other = make_trainer(untied)
    other.model.resize_token_embeddings(300)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_checkpoint(other, folder)
