"""Each RL config of the repository runs ten steps on a tiny model, changed only in sizes.

Also: greedy baselines, cached batches, reward models, curricula, growing rows, metrics.
"""

from __future__ import annotations
import json
import math
import re
from pathlib import Path
from typing import Any
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
from areal_lite import load_run
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_rollout, run_training
from areal_lite.runs.training_run import StepMetrics
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from areal_lite.tools.verify.verify import check_run
from tests.e2e.agents import CountsItsCalls, InOrder
from tests.embedded.serving import load, logprobs_of, worst
from tests.fixtures.tiny_model import build_tiny_model

EXTRA_METRICS = {
    "on_policy": {"train/advantage_mean"},
    "ppo": {"train/critic_loss", "train/value_explained_variance", "train/reward_kl", "train/kl"},
    "rloo": {"train/kl"},
    "async": {"train/correction_weight"},
    "gspo_lora": {"train/kl", "train/clip_fraction"},
}


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def small(name: str, run_yaml: Path) -> Path:
    """Return the config with the tiny model, its workflow and small numbers in place of its own."""
    tiny: dict[str, Any] = yaml.safe_load(run_yaml.read_text())
    config: dict[str, Any] = yaml.safe_load(Path(f"configs/{name}.yaml").read_text())
    config |= {key: tiny[key] for key in ("fileroot", "model_path", "workflow", "train_dataset", "server")}
    config |= {"eval_dataset": None, "save_model": False, "checkpoint": {"every_steps": 5}}
    config["rollout"] |= {
        "consumer_batch_size": 4,
        "max_concurrent_rollouts": 16,
        "gconfig": {"max_new_tokens": 4},
        "dump_to_file": False,
        "weight_update": "disk",
        "addresses": tiny["rollout"]["addresses"],
    }
    config["trainer"] |= {"total_steps": 10, "dtype": "float32", "num_threads": 1, "device": "cpu"}
    path = run_yaml.with_name(f"{name}.yaml")
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("name", EXTRA_METRICS)
def test_a_config_runs_ten_steps(name: str, served_yaml: Path) -> None:
    config = load_config(small(name, served_yaml))
    run_dir = run_training(config).run_dir
    lines = records(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 11))
    for line in lines:
        assert line["train/skipped_updates"] == 0
        assert all(value is not None and math.isfinite(value) for value in line.values())
    assert lines[-1].keys() >= EXTRA_METRICS[name]
    before = load_file(Path(config.model_path) / "model.safetensors")
    after = load_file(run_dir / "weights" / "v00000010" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    saved = [path.name for path in sorted((run_dir / "checkpoints").iterdir())]
    assert saved == ["step_00000005", "step_00000010"]


def test_documented_metrics_are_exactly_those_that_runs_write(served_yaml: Path) -> None:
    document = Path("docs/metrics.md").read_text()
    of_supervised = re.search(r"^## Conversations.*?(?=^## )", document, re.MULTILINE | re.DOTALL)
    assert of_supervised is not None
    document = document.replace(of_supervised[0], "")
    scopes = "train|eval|timing|data|episodes|rollout|eval-rollout|servers/N|perf|checkpoint"
    documented = set(re.findall(rf"`((?:{scopes})/\w+)`", document))
    documented |= {name.replace("/seconds_", "/ms_per_token_") for name in documented}
    documented -= {"train/ms_per_token_PHASE", "train/ms_per_token_step", "rollout/NAME", "eval-rollout/NAME"}
    table = re.search(r"^\| suffix.*?(?=^$)", document, re.MULTILINE | re.DOTALL)
    assert table is not None
    for scope in ("engine_mismatch", "staleness_drift"):
        documented |= {f"train/{scope}/{name}" for name in re.findall(r"`(\w+)`", table[0])}
    given = {
        "trainer.advantage": "gae",
        "trainer.critic": "{learning_rate: 1.0e-3}",
        "trainer.kl": "{coef: 0.1, place: reward}",
        "trainer.loss_kwargs": "{dual_clip: 3.0}",
        "trainer.correction": "{max_episode_kl: 100.0}",
        "trainer.minibatches_per_step": "2",
        "trainer.overlong_buffer": "4",
        "trainer.total_steps": "6",
        "checkpoint.every_steps": "2",
        "rollout.max_head_offpolicyness": "2",
        "rollout.faults.probe_every_steps": "2",
        "rollout.consumer_batch_size": "2",
        "save_model": "false",
        "dump_training": "true",
    }
    choosing = {"trainer.loss": "clip_cov", "trainer.minibatches_per_step": "2", "trainer.total_steps": "1"}
    choosing["rollout.gconfig"] = "{max_new_tokens: 8, top_p: 0.9}"
    written = set()
    for changes in (given, choosing | {"trial_name": "choosing", "save_model": "false"}):
        config = load_config(served_yaml, [f"{key}={value}" for key, value in changes.items()])
        run_dir = run_training(config).run_dir
        probed = [line["step"] for line in records(run_dir) if "train/probe_log_prob_diff" in line]
        assert probed == ([3, 5] if changes is given else [])
        written |= {name.replace("servers/0/", "servers/N/") for line in records(run_dir) for name in line}
    alone = load_config(served_yaml, ["trial_name=alone"])
    alone_writes: list[dict[str, float]] = []
    run_rollout(alone, on_step=lambda _, metrics: alone_writes.append(metrics))
    written |= {name.replace("servers/0/", "servers/N/") for name in alone_writes[0]}
    written -= {"step", "time"}
    if_any = {"episodes/rejected", "episodes/failed", "episodes/cancelled"}
    if_any |= {"rollout/blocked_s", "rollout/abandoned_threads", "perf/device_gb", "perf/device_peak_gb"}
    if_any |= {f"train/terminated_length_{figure}" for figure in ("mean", "max", "min")}
    assert documented - if_any == written - if_any


def test_curriculum_and_growing_dataset_get_each_trained_batch(
    served_yaml: Path,
) -> None:
    """V61, V62, V63"""
    InOrder.batches.clear()
    CountsItsCalls.calls = 0
    given = [
        f"train_dataset.{key}={{path: tests.e2e.agents, name: {name}}}"
        for key, name in (("sampler", "InOrder"), ("datagen", "CountsItsCalls"))
    ]
    given += ["trainer.total_steps=2", "eval_dataset=null"]
    run_dir = run_training(load_config(served_yaml, [*given, "save_model=false"])).run_dir
    rewards = [float(batch.batch["rewards"].mean()) for batch in InOrder.batches]
    assert rewards == pytest.approx([line["train/reward_mean"] for line in records(run_dir)])
    questions = [{row["question"] for row in batch.non_tensor_batch["rows"]} for batch in InOrder.batches]
    assert questions == [{f"say {number}" for number in numbers} for numbers in (range(4), range(4, 8))]
    assert CountsItsCalls.calls == 1 + 1  # when it was made, and after the first of two steps


def test_a_failed_greedy_episode_gives_no_baseline(served_yaml: Path) -> None:
    """V40"""
    given = ["trainer.advantage=remax", "workflow=tests.e2e.agents.WithoutGreedyAnswers"]
    given += ["trainer.total_steps=1", "eval_dataset=null", "save_model=false"]
    causes: list[str] = []

    def on_step(step: int, metrics: dict[str, float]) -> None:
        assert isinstance(metrics, StepMetrics)
        causes.append(metrics.top_cause)

    (line,) = records(run_training(load_config(served_yaml, given), on_step=on_step).run_dir)
    assert causes == ["agent, RuntimeError: no greedy answer"]
    assert line["train/reward_min"] >= 2
    assert abs(line["train/advantage_mean"]) < 0.5  # less the mean of its group


def test_remax_uses_one_greedy_episode_as_baseline(served_yaml: Path) -> None:
    config = load_config(served_yaml, ["trainer.advantage=remax", "trainer.total_steps=2", "eval_dataset=null"])
    lines = records(run_training(config).run_dir)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["train/advantage_std"] > 0


def test_cached_batches_are_trained_again_without_rollouts(served_yaml: Path, tmp_path: Path) -> None:
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
        summary = run_training(load_config(served_yaml, [*given, f"trial_name={trial}", *changes]))
        runs.append([line["train/reward_mean"] for line in records(summary.run_dir)])
        assert (summary.run_dir / "profile" / "steps_1-2.json").stat().st_size > 1000
        assert (summary.run_dir / "scores" / "1.jsonl").exists() == (trial == "a")  # b asked nobody
    assert runs[0] == runs[1]


def test_a_reward_model_rewards_sampled_and_greedy_answers_and_dumps(served_yaml: Path, tmp_path: Path) -> None:
    """V40, V45"""
    model = yaml.safe_load(served_yaml.read_text())["model_path"]
    judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    judge.save_pretrained(tmp_path / "judge")
    given = [f"reward_model={tmp_path / 'judge'}", "trainer.advantage=remax", "trainer.total_steps=1"]
    given += ["eval_dataset=null", "dump_scores=true", "save_model=false"]
    summary = run_training(load_config(served_yaml, given))
    (line,) = records(summary.run_dir)
    scores = [json.loads(row)["score"] for row in (summary.run_dir / "scores" / "1.jsonl").read_text().splitlines()]
    assert sum(scores) / len(scores) == pytest.approx(line["train/reward_mean"], abs=1e-6)
    # Rewards of the workflow are eighths; the reward model's are not, and advantages follow them.
    assert any(score * 8 % 1 > 1e-3 for score in scores)
    spread = max(scores) - min(scores)
    assert max(abs(line["train/advantage_max"]), abs(line["train/advantage_min"])) < 3 * spread


def test_a_run_learns_from_a_teachers_logprobs_of_its_own_tokens(served_yaml: Path, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "teacher", seed=7)
    given = {
        "trainer.kl": "{coef: 1.0, estimator: k1, place: advantage, teacher: {addresses: [ADDRESS]}}",
        "rollout.dump_to_file": "true", "dump_training": "true", "eval_dataset": "null", "trainer.total_steps": "2",
        "save_model": "false",
    }  # fmt: skip
    changes = [f"{key}={value}" for key, value in given.items()]
    with EmbeddedServer(model_path=str(model), dtype="float32", num_threads=1, device="cpu") as teacher:
        changes[0] = changes[0].replace("ADDRESS", teacher.address)
        run_dir = run_training(load_config(served_yaml, changes)).run_dir
    assert all(line["train/kl"] > 0.01 for line in records(run_dir))
    assert check_run(run_dir).findings == []
    scored, tokens = load(model), load_run(run_dir).tokens
    for _, episode in tokens[tokens["reference_logprobs"].notna()].groupby("episode"):
        ids = tokens[tokens["episode"] == episode["episode"].iloc[0]]["token"].tolist()
        start = len(ids) - len(episode)
        expected = logprobs_of(scored, ids[:start], ids[start:])
        assert worst(episode["reference_logprobs"].tolist(), expected) < 1e-4
