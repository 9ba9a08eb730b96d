"""Models that read images: which ones, what of them trains, and what of them is written and sent."""

from __future__ import annotations
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
import pytest
import torch
import transformers
from safetensors.torch import load_file
from areal_lite.config.trainer_config import LearnerConfig, LoRAConfig
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_image_model
from areal_lite.models.lora import planned_shape
from areal_lite.models.policy_model import load_policy
from areal_lite.models.vision_model import auto_class_of
from areal_lite.servers.weights.weight_folder import publish_weights, sent_weights
from tests.fixtures.tiny_vlm import save_tiny_idefics3, save_tiny_vlm

CPU = torch.device("cpu")
BUILDERS: dict[str, Callable[..., Path]] = {"qwen2_5_vl": save_tiny_vlm, "idefics3": save_tiny_idefics3}
VISION = {"qwen2_5_vl": ("model.visual.",), "idefics3": ("model.vision_model.", "model.connector.")}
STORED = VISION | {"qwen2_5_vl": ("visual.",)}  # in checkpoints


@pytest.fixture(scope="module", params=BUILDERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS[family](tmp_path_factory.mktemp(family))


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_tower_and_connector_are_frozen_unless_they_are_to_train(folder: Path, family: str) -> None:
    frozen, opened = (load_policy(str(folder), device=CPU, vision=vision) for vision in ("frozen", "train"))
    names = {name for name, _ in opened.named_parameters()}
    assert trained(opened) == names
    assert trained(frozen) == {name for name in names if not name.startswith(VISION[family])}
    assert frozen.dtype == torch.float32


def test_adapters_are_on_the_language_part_alone(folder: Path, family: str) -> None:
    lora = LoRAConfig(rank=2)
    model = load_policy(str(folder), device=CPU, lora=lora)
    names = trained(model)
    assert names
    assert all(".lora_" in name and not name.startswith(VISION[family]) for name in names)
    assert planned_shape(str(folder), lora).layers == (
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
    )  # fmt: skip
    with pytest.raises(ConfigError, match="not linear layers"):
        load_policy(str(folder), device=CPU, lora=LoRAConfig(target_modules="qkv" if "qwen" in family else "fc1"))


def test_adapters_with_a_trained_tower_are_refused() -> None:
    with pytest.raises(ValueError, match="adapters are on the language part alone"):
        LearnerConfig(learning_rate=1e-3, lora=LoRAConfig(), vision="train")


@pytest.mark.parametrize("vision", ["frozen", "train"])
def test_a_published_folder_is_whole_and_a_frozen_tower_is_not_sent(
    folder: Path, family: str, tmp_path: Path, vision: Any
) -> None:
    model = load_policy(str(folder), device=CPU, vision=vision)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    published = publish_weights(model, tmp_path, 1, dtype=torch.float32)
    loaded, report = auto_class_of(str(published)).from_pretrained(published, output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(loaded.get_parameter(name), weight) for name, weight in model.named_parameters())

    sent = dict(sent_weights(model, torch.float32))
    assert any(name.startswith(STORED[family]) for name in sent) == (vision == "train")
    stored = load_file(published / "model.safetensors")
    assert sent.keys() == {name for name in stored if vision == "train" or not name.startswith(STORED[family])}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in sent.items())


def test_merged_adapters_are_sent_without_the_tower(folder: Path, family: str) -> None:
    model = load_policy(str(folder), device=CPU, lora=LoRAConfig(rank=2))
    sent = dict(sent_weights(model, torch.float32))
    assert sent
    assert not any(name.startswith(STORED[family]) for name in sent)
    assert sent.keys() < load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize("refused", ["gemma3", "llava"])
def test_other_models_with_images_are_refused_by_name(tmp_path: Path, refused: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": refused, "vision_config": {"hidden_size": 8}}))
    for check in (check_image_model, auto_class_of):
        with pytest.raises(ConfigError, match=rf"is a {refused} model.*use one of qwen2_vl, qwen2_5_vl, idefics3"):
            check(str(tmp_path))


def test_models_of_text_are_loaded_as_before(tiny: Path) -> None:
    check_image_model(str(tiny))
    with pytest.raises(ConfigError, match="trainer.vision is train, .* which reads no images: remove trainer.vision"):
        check_image_model(str(tiny), trains_vision=True)
    assert auto_class_of(str(tiny)) is transformers.AutoModelForCausalLM
    assert auto_class_of(str(tiny / "absent")) is transformers.AutoModelForCausalLM
