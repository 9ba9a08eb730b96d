"""RL on pictures, from an agent's request to updated weights: server and trainer see the same."""

from __future__ import annotations
import json
from pathlib import Path
import pytest
from areal_lite.cli.main import main
from tests.fixtures.tiny_vlm import save_tiny_vlm


@pytest.mark.slow
def test_server_and_trainer_agree_on_pictures_after_updates(tmp_path: Path) -> None:
    model = save_tiny_vlm(tmp_path / "model")
    few = ("rollout.consumer_batch_size=2", "rollout.group_size=4", "train_dataset.kwargs.size=8")
    machine = ("server.dtype=float32", "trainer.dtype=float32", "trainer.device=cpu")
    given = (
        f"model_path={model}",
        f"fileroot={tmp_path}",
        "trial_name=t",
        "eval_dataset=null",
        "trainer.total_steps=3",
    )
    assert main(["train", "configs/vision_grpo.yaml", *given, *few, *machine]) == 0

    run = tmp_path / "vision_grpo" / "t"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    farthest = [r["train/engine_mismatch/log_prob_diff_max"] for r in records if "train/loss" in r]
    assert len(farthest) == 3
    assert max(farthest) < 1e-4
    assert list((run / "images").glob("*.png"))
    assert main(["verify", str(run)]) == 0
