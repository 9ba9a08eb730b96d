"""Steps of reinforcement learning on sequences with images."""

from __future__ import annotations
import dataclasses
from pathlib import Path
import pytest
import torch
from safetensors.torch import load, save
from areal_lite.config.trainer_config import KLConfig, TrainerConfig
from areal_lite.data.batch.data_proto_file import from_tensors, to_tensors
from areal_lite.data.batch.training_batch import training_sequences
from areal_lite.errors import TrainingError
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from tests.fixtures.tiny_vlm import IMAGE_ID, save_tiny_vlm
from tests.fixtures.vision_sequences import Pictures
from tests.trainer.training_data import training_batch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vlm(tmp_path_factory.mktemp("vlm"))


def test_a_step_trains_on_images_with_a_reference_and_a_ratio_of_1(model: Path, tmp_path: Path) -> None:
    pictures = Pictures(model, tmp_path)
    image, other = pictures.image(0), pictures.image(1)
    sequences = [
        pictures.sequence([9, 3, picture, 4, 8, 20 + i, 30], 2, placeholder=IMAGE_ID, group=str(g), member=i)
        for g, picture in enumerate((image, other))
        for i in range(2)
    ]
    config = TrainerConfig(
        total_steps=2, learning_rate=1e-3, dtype="float32", num_threads=1, device="cpu", kl=KLConfig(coef=0.1)
    )
    trainer = PolicyTrainer(config, model_path=str(model), seed=1)
    with torch.no_grad():
        behaviour = [pictures.logprobs(trainer.model, one).numpy() for one in sequences]
    for i, (one, values) in enumerate(zip(sequences, behaviour, strict=True)):
        one.reward = float(i % 2)
        one.logprobs = torch.zeros(len(one)).numpy()
        one.logprobs[-2:] = values
    trainer.learner.module.pixels = pictures.pixels

    sent = from_tensors(load(save(to_tensors(training_batch(sequences)))))  # as to other ranks
    assert [one.images for one in training_sequences(sent)] == [one.images for one in sequences]
    first = trainer.train_step(sent, version=0)
    second = trainer.train_step(sent, version=1)

    assert first["staleness_drift/log_prob_diff_max"] < 1e-4
    assert first["grad_norm"] > 0
    assert abs(first["kl"]) < 1e-6 < second["kl"]


def test_pixels_in_a_batch_are_refused(model: Path, tmp_path: Path) -> None:
    pictures = Pictures(model, tmp_path)
    one = pictures.sequence([9, pictures.image(0), 8], 1, placeholder=IMAGE_ID)
    config = TrainerConfig(total_steps=1, learning_rate=1e-3, dtype="float32", num_threads=1, device="cpu")
    trainer = PolicyTrainer(config, model_path=str(model), seed=1)
    batch = training_batch([dataclasses.replace(one, multi_modal_inputs={"pixel_values": torch.zeros(1)})])
    with pytest.raises(TrainingError, match="reads images by their spans"):
        trainer.train_step(batch, version=0)
