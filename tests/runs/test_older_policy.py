"""Which weights an older version of the policy has, during a run and after a resume."""

from __future__ import annotations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.run_config import OlderPolicyConfig, RunConfig
from areal_lite.config.server_config import ServerConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.runs import engine_stack
from areal_lite.runs.older_policy import OlderPolicy
from areal_lite.servers.weights.published_weights import WeightFolder
from areal_lite.servers.weights.weight_folder import version_name


def test_one_that_never_changes_has_the_first_weights_also_on_a_server_of_another_run(tmp_path: Path) -> None:
    loaded: list[int] = []
    engine: Any = SimpleNamespace(update_weights=lambda weights: loaded.append(weights.version))
    older = OlderPolicy(None, lambda step: WeightFolder(str(step), step), tmp_path, engine)
    for step in range(3):
        older.follow(step)
    older.resume(2)  # nothing is kept, as if its own server had been started with them
    assert loaded == [0]
    (tmp_path / version_name(0)).mkdir()
    older.resume(2)
    assert loaded == [0, 0]


def test_its_server_leaves_the_port_to_the_first_one_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(config: RunConfig, *others: Any) -> Any:
        raise KeyboardInterrupt(f"{config.server.replicas} on {config.server.port}")

    monkeypatch.setattr(engine_stack, "_servers", start)
    config = RunConfig(
        experiment_name="e",
        model_path="m",
        workflow="my.Agent",
        train_dataset=DatasetConfig(path="rows.jsonl"),
        trainer=TrainerConfig(total_steps=1, learning_rate=1.0),
        server=ServerConfig(port=30_000, replicas=2),
        older_policy=OlderPolicyConfig(),
    )
    with pytest.raises(KeyboardInterrupt, match="1 on 0"), engine_stack.generating_engine(config, tmp_path):
        pass


@pytest.mark.parametrize("every", [1, 2, 3, 4])
@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_has_the_older_weights_of_an_uninterrupted_one(every: int, kept: bool, tmp_path: Path) -> None:
    """Those of the step itself if they are gone."""

    def run(number: int) -> OlderPolicy:
        def load(weights: Any) -> None:
            loaded[number] = weights.version

        engine: Any = SimpleNamespace(update_weights=load)
        return OlderPolicy(every, lambda step: WeightFolder(str(step), step), tmp_path, engine)

    loaded = {0: 0}
    for step in range(1, 14):
        run(0).follow(step)
        if kept:
            (tmp_path / version_name(step)).mkdir()
        loaded[1] = step if step % every == 0 else 0  # what its server starts with, or follow() loads
        run(1).resume(step)
        assert loaded[1] == (loaded[0] if kept or loaded[0] == 0 else step), step
