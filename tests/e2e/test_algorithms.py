"""Each config of the repository that trains by rewards runs ten steps on a tiny model, as it stands but for sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForSequenceClassification

from areal_lite.api.config_loader import load_config
from areal_lite.launch.run import run_training

EXTRA_METRICS = {
    "on_policy": {"train/advantage_mean"},
    "ppo": {"train/critic_loss", "train/value_explained_variance", "train/reward_kl", "train/kl"},
    "rloo": {"train/kl"},
    "async": {"train/correction_weight"},
    "gspo_lora": {"train/kl", "train/clip_fraction"},
}


def small(name: str, run_yaml: Path) -> Path:
    """Return the config with the tiny model, its workflow and small numbers in place of its own."""
    tiny: dict[str, Any] = yaml.safe_load(run_yaml.read_text())
    config: dict[str, Any] = yaml.safe_load(Path(f"configs/{name}.yaml").read_text())
    config |= {key: tiny[key] for key in ("fileroot", "model_path", "workflow", "train_dataset", "server")}
    config |= {"eval_dataset": None, "save_model": False}
    config["rollout"] |= {
        "consumer_batch_size": 4,
        "max_concurrent_rollouts": 16,
        "gconfig": {"max_new_tokens": 4},
        "dump_to_file": False,
    }
    config["trainer"] |= {"total_steps": 10, "dtype": "float32", "num_threads": 1, "device": "cpu"}
    path = run_yaml.with_name(f"{name}.yaml")
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("name", EXTRA_METRICS)
def test_a_config_runs_ten_steps(name: str, run_yaml: Path) -> None:
    summary = run_training(load_config(small(name, run_yaml)))
    lines = [json.loads(line) for line in (summary.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    for line in lines:
        assert line["train/skipped_updates"] == 0
        assert all(value is not None and math.isfinite(value) for value in line.values())
    assert lines[-1].keys() >= EXTRA_METRICS[name]
    assert any(line["train/grad_norm"] > 0 for line in lines)


def test_remax_compares_with_one_greedy_answer(run_yaml: Path) -> None:
    config = load_config(run_yaml, ["trainer.advantage=remax", "trainer.total_steps=2", "eval_dataset=null"])
    summary = run_training(config)
    lines = [json.loads(line) for line in (summary.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["train/advantage_std"] > 0


def test_a_batch_is_dumped_once_and_trained_again_and_again(run_yaml: Path, tmp_path: Path) -> None:
    """V31"""
    given = [
        f"rollout_cache={tmp_path / 'cache'}",
        "trainer.total_steps=2",
        "eval_dataset=null",
        "save_model=false",
    ]
    given += ["dump_scores=true", "profile_steps=[1, 2]"]
    runs = []
    for trial, changes in (("a", ["trainer.loss=ppo"]), ("b", ["trainer.loss=cispo"])):
        summary = run_training(load_config(run_yaml, [*given, f"trial_name={trial}", *changes]))
        lines = (summary.run_dir / "metrics.jsonl").read_text().splitlines()
        runs.append([json.loads(line)["train/reward_mean"] for line in lines])
        assert (summary.run_dir / "profile" / "steps_1-2.json").stat().st_size > 1000
        assert (summary.run_dir / "scores" / "1.jsonl").exists() == (trial == "a")  # b asked nobody
    assert runs[0] == runs[1]


def test_a_reward_model_judges_answers_greedy_ones_and_what_is_dumped(run_yaml: Path, tmp_path: Path) -> None:
    """V40, V45"""
    model = yaml.safe_load(run_yaml.read_text())["model_path"]
    judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    judge.save_pretrained(tmp_path / "judge")
    given = [f"reward_model={tmp_path / 'judge'}", "trainer.advantage=remax", "trainer.total_steps=1"]
    given += ["eval_dataset=null", "dump_scores=true", "save_model=false"]
    summary = run_training(load_config(run_yaml, given))
    (line,) = map(json.loads, (summary.run_dir / "metrics.jsonl").read_text().splitlines())
    scores = [
        json.loads(row)["score"] for row in (summary.run_dir / "scores" / "1.jsonl").read_text().splitlines()
    ]
    assert sum(scores) / len(scores) == pytest.approx(line["train/reward_mean"], abs=1e-6)
    # Rewards of the workflow are eighths; the judge's are no such numbers, and advantages are of its size.
    assert any(score * 8 % 1 > 1e-3 for score in scores)
    spread = max(scores) - min(scores)
    assert max(abs(line["train/advantage_max"]), abs(line["train/advantage_min"])) < 3 * spread
