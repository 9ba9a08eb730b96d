"""How a run publishes its weights."""

from pathlib import Path
import pytest
import torch
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.config.trainer_config import LoRAConfig
from areal_lite.models.policy_model import load_policy
from areal_lite.servers.weights.published_weights import WeightFolder
from areal_lite.servers.weights.publisher import weight_publisher
from areal_lite.servers.weights.weight_folder import WEIGHTS_FILE
from tests.fixtures.tiny_model import build_tiny_model


@pytest.mark.parametrize("way", ["broadcast", "memory"])
def test_weights_that_files_name_otherwise_are_published_as_files_with_a_warning(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_policy(str(build_tiny_model(tmp_path / "tiny")), device=torch.device("cpu"))
    model._weight_conversions = ["one weight of several"]  # as models with joined experts have
    config = InferenceEngineConfig(weight_update=way)

    with weight_publisher(config, model, tmp_path, torch.float32) as publish:
        del model._weight_conversions
        published = publish(3)

    assert isinstance(published, WeightFolder)
    assert not (Path(published.path) / WEIGHTS_FILE).is_symlink()
    assert f"rollout.weight_update {way} is not possible here" in caplog.text


@pytest.mark.parametrize("way", ["disk", "adapter"])
def test_the_last_version_stays_after_the_end(way: str, tmp_path: Path) -> None:
    lora = LoRAConfig() if way == "adapter" else None
    model = load_policy(str(build_tiny_model(tmp_path / "tiny")), device=torch.device("cpu"), lora=lora)
    with weight_publisher(InferenceEngineConfig(weight_update=way), model, tmp_path / "w", torch.float32) as publish:
        for version in (98, 99, 100):
            publish(version)
        assert len(list((tmp_path / "w").iterdir())) == 2
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["v00000100"]
