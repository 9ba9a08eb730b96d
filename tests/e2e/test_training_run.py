"""One YAML, the real embedded server, the real trainer: an agent learns, and the record of it is whole."""

from __future__ import annotations
import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from areal_lite.config.loader import load_config
from areal_lite.errors import ConfigError, EpisodeError, RunDirBusyError
from areal_lite.rollout.dumps import trajectory_dumper
from areal_lite.runs import rl_run
from areal_lite.runs.entry_points import (
    check_learnable,
    check_startable,
    check_trainable,
    run_evaluation,
    run_rollout,
    run_training,
)
from areal_lite.runs.evaluation import Evaluation
from areal_lite.runs.folder.run_directory import run_directory
from areal_lite.runs.run_data import WorkflowChoice
from areal_lite.runs.training_run import Summary
from areal_lite.servers.programs.server_process import ServerProcess

TIMES = re.compile("train/(seconds_|ms_per_token_|tokens_per_second|mfu)")


def train(path: Path, *overrides: str) -> Summary[Evaluation]:
    return run_training(load_config(path, overrides))


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def dumped(run_dir: Path, scope: str) -> list[dict[str, Any]]:
    files = sorted((run_dir / scope).glob("*/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


def test_on_policy_training_leaves_metrics_dumps_weights_and_a_model(run_yaml: Path) -> None:
    summary = train(run_yaml)
    steps = [r for r in records(summary.run_dir) if "train/loss" in r]
    evaluations = [r for r in records(summary.run_dir) if "eval/reward" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert [r["step"] for r in evaluations] == [0, 4]
    assert all(r["train/staleness_max"] == 0 for r in steps)
    # What was trained, and nothing else, is accepted in the dump: every token of the version it was trained at.
    accepted = [r for r in dumped(summary.run_dir, "rollout") if r["status"] == "accepted"]
    assert len(accepted) == 4 * 4 * 4
    for version in range(4):
        of_version = [r for r in accepted if r["head_version"] == r["tail_version"] == version]
        assert len(of_version) == 16
    assert sum(sum(map(sum, (t["loss_mask"] for t in r["turns"]))) for r in accepted) == sum(
        r["train/trained_tokens"] for r in steps
    )
    # The engine and the trainer agree on every log-prob: exact tokens, same temperature, same weights.
    assert max(r["train/engine_mismatch/log_prob_diff_max"] for r in steps) < 1e-3
    assert len(dumped(summary.run_dir, "eval-rollout")) == 8
    assert not list((summary.run_dir / "weights").iterdir())  # they were published in memory
    assert summary.model_dir is not None
    AutoModelForCausalLM.from_pretrained(summary.model_dir)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_a_deterministic_run_has_no_mismatch(run_yaml: Path, steps: int) -> None:
    changes = [f"trainer.total_steps={steps}", "trainer.learning_rate=1e-3", "trainer.minibatches_per_step=2"]
    changes += ["trainer.entropy_coef=0.01", "rollout.gconfig.temperature=0.8", "eval_dataset=null", "save_model=false"]
    run = train(run_yaml, "trainer.deterministic=true", *changes)
    assert [r["train/engine_mismatch/log_prob_diff_max"] for r in records(run.run_dir)] == [0.0] * steps


@pytest.mark.timeout(300)
def test_a_run_with_workers_trains_on_the_same_tokens_as_without(run_yaml: Path) -> None:
    runs = []
    for workers in (1, 2):
        changes = [f"rollout.workers={workers}", f"trial_name=workers{workers}", "trainer.total_steps=2"]
        summary = train(run_yaml, "trainer.deterministic=true", *changes)
        lines = [record for scope in ("rollout", "eval-rollout") for record in dumped(summary.run_dir, scope)]
        tokens = [([turn["ids"] for turn in r["turns"]], r["reward"], r["status"], r["head_version"]) for r in lines]
        metrics = [
            {k: v for k, v in r.items() if k.split("/")[-1] in ("loss", "reward")} for r in records(summary.run_dir)
        ]
        runs.append((sorted(map(repr, tokens)), metrics))
    assert len(runs[0][0]) == 2 * 16 + 2 * 4
    assert runs[0] == runs[1]


def test_a_workflow_that_workers_cannot_load_is_refused_before_the_start(run_yaml: Path) -> None:
    class Local:
        async def run(self, data: Any, **extra_kwargs: Any) -> float:
            return 1.0

    config = load_config(run_yaml, ["rollout.workers=2"])
    check_startable(config)
    with pytest.raises(ConfigError, match="rollout.workers is 2, and workflow .*Local cannot be sent to a process"):
        check_startable(config, WorkflowChoice(Local, {}))


def test_minibatches_of_unequal_size_are_said(run_yaml: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_learnable(load_config(run_yaml, ["trainer.minibatches_per_step=2"]))
    assert "minibatches" not in caplog.text
    check_learnable(load_config(run_yaml, ["trainer.minibatches_per_step=3"]))
    assert "does not divide rollout.consumer_batch_size 4: 1 minibatches have 2 groups and the others 1" in caplog.text


def test_every_way_to_publish_weights_gives_the_same_run(run_yaml: Path) -> None:
    curves = {}
    for way in ("disk", "memory", "broadcast"):
        run_dir = train(
            run_yaml,
            *(f"trial_name={way}", f"rollout.weight_update={way}", "trainer.deterministic=true"),
            *("eval_dataset=null", "save_model=false"),
        ).run_dir
        curves[way] = [
            {k: v for k, v in r.items() if k.startswith("train/") and not TIMES.search(k)} for r in records(run_dir)
        ]
        kept = ["v00000004"] if way == "disk" else []
        assert sorted(path.name for path in (run_dir / "weights").glob("*")) == kept
    for way in ("memory", "broadcast"):
        for one, other in zip(curves["disk"], curves[way], strict=True):
            assert {k: (v, other[k]) for k, v in one.items() if v != other[k]} == {}


def test_a_run_can_push_adapters_alone(run_yaml: Path) -> None:
    lora = ("trainer.lora.rank=4", "trainer.learning_rate=1e-2", "trainer.deterministic=true")
    summary = train(run_yaml, *lora, "rollout.weight_update=adapter")
    steps = [r for r in records(summary.run_dir) if "train/loss" in r]
    # Trainer and server compute an adapted layer with the same operations; merged weights are rounded.
    assert [r["train/engine_mismatch/log_prob_diff_max"] for r in steps] == [0.0] * 4
    assert [(r["train/staleness_mean"], r["train/staleness_max"]) for r in steps] == [(0, 0)] * 4
    (folder,) = (summary.run_dir / "weights").iterdir()
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert "model.safetensors" not in files
    assert files["adapter_model.safetensors"] < (summary.model_dir / "model.safetensors").stat().st_size
    AutoModelForCausalLM.from_pretrained(summary.model_dir)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["rollout.weight_update=adapter"], "rollout.weight_update is adapter, and there are no adapters"),
        (["rollout.router=127.0.0.1:1"], "rollout.backend is embedded: only SGLang servers"),
        (["server.router=true"], "server.router is an sglang-router, and server.backend is embedded"),
        (["server.router=true", "rollout.addresses=[127.0.0.1:1]"], "set rollout.router to the address"),
        (["server.router=true", "rollout.weight_update=adapter", "trainer.lora.rank=4"], "Use one of the two"),
    ],
)
def test_impossible_adapters_and_routers_are_refused_before_the_run(
    run_yaml: Path, changes: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        train(run_yaml, *changes)


def test_a_second_run_on_a_running_server_starts_with_the_models_weights(served_yaml: Path) -> None:
    for trial in ("first", "second"):
        summary = train(served_yaml, f"trial_name={trial}", "trainer.total_steps=2")
        steps = [r for r in records(summary.run_dir) if "train/loss" in r]
        assert [(r["train/staleness_mean"], r["train/staleness_max"]) for r in steps] == [(0, 0)] * 2
        assert max(r["train/engine_mismatch/log_prob_diff_max"] for r in steps) < 1e-3


def test_asynchronous_training_uses_and_keeps_the_staleness_bound(run_yaml: Path) -> None:
    summary = train(
        run_yaml,
        "rollout.max_head_offpolicyness=2",
        "trainer.total_steps=6",
        "eval_dataset=null",
        "server.dtype=auto",
    )
    staleness = [r["train/staleness_max"] for r in records(summary.run_dir) if "train/loss" in r]
    assert max(staleness) <= 2
    assert max(staleness) > 0
    recorded = yaml.safe_load((summary.run_dir / "config.yaml").read_text())
    assert recorded["server"]["dtype"] == "float32"  # that of the trainer, so a replay elsewhere computes the same


def test_the_agent_learns(served_yaml: Path) -> None:
    summary = train(
        served_yaml, "trainer.total_steps=25", "rollout.consumer_batch_size=8", "rollout.dump_to_file=false"
    )
    rewards = [r["train/reward_mean"] for r in records(summary.run_dir) if "train/loss" in r]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_a_run_folder_belongs_to_one_run_and_one_process(served_yaml: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="areal_lite")
    some = ["trainer.total_steps=1", "eval_dataset=null", "save_model=false"]
    config = load_config(served_yaml, some)
    run_training(config)
    assert run_training(config).steps == 0
    assert f"nothing to do: {config.run_dir} has trained all 1 steps" in caplog.text
    without = [*some, "checkpoint.every_minutes=null", "trial_name=without"]
    for says in ("", "already holds a training run"):
        with pytest.raises(ConfigError, match=says) if says else nullcontext():
            run_training(load_config(served_yaml, without))
    with (
        run_directory(config, fresh=False),
        pytest.raises(RunDirBusyError, match="held by a run that is still alive"),
        run_directory(config, fresh=False),
    ):
        pass


@pytest.mark.parametrize(("device", "opened"), [("cpu", 1), ("cuda", 0)])
def test_the_trainer_loads_while_servers_start_unless_they_may_share_a_gpu(
    run_yaml: Path, device: str, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def wait(server: ServerProcess) -> None:
        raise EpisodeError(f"{len(calls)} opened")

    monkeypatch.setattr(rl_run, "resolve_device", lambda _: torch.device(device))
    monkeypatch.setattr(rl_run, "open_trainer", lambda *_: calls.append(1))
    monkeypatch.setattr(ServerProcess, "wait_until_ready", wait)
    with pytest.raises(EpisodeError, match=f"{opened} opened"):
        train(run_yaml)


def test_rollout_and_evaluation_run_alone(served_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory_dumper, "GATHER_S", 600.0)  # what is dumped at the record was waited for
    config = load_config(served_yaml)
    seen: list[dict[str, Any]] = []
    results = run_rollout(config, on_step=lambda step, metrics: seen.append(metrics))
    assert [r.status for r in results] == ["accepted"] * 16
    assert all(len(r.rewards) == 4 for r in results)
    several = load_config(served_yaml, ["evaluation.group_size=2", "rollout.eval_gconfig={max_new_tokens: 8}"])

    def on_record(step: int, metrics: dict[str, float]) -> None:
        seen.append(metrics)
        assert len(dumped(config.run_dir, "eval-rollout")) == 8

    evaluation = run_evaluation(several, on_step=on_record)
    rewards = [reward for result in results for reward in result.rewards]
    assert seen[0]["rollout/reward"] == pytest.approx(sum(rewards) / 64)
    assert (seen[0]["episodes/accepted"], seen[0]["rollout/answers"], seen[0]["servers/0/requests"]) == (16, 1, 64)
    assert seen[1].items() >= evaluation.metrics().items() and seen[1]["eval-rollout/answers"] == 1
    for command, metrics in zip(("rollout", "eval"), seen, strict=True):
        (record,) = map(json.loads, (config.run_dir / f"{command}_metrics.jsonl").read_text().splitlines())
        assert record.items() >= metrics.items()
    assert not (config.run_dir / "metrics.jsonl").exists()  # it belongs to training
    assert (evaluation.episodes, evaluation.failed) == (8, 0)
    figures = evaluation.metrics()
    assert figures["eval/held_out/reward/mean@2"] == pytest.approx(evaluation.reward)
    assert figures["eval/held_out/reward/best@2/mean"] >= figures["eval/held_out/reward/worst@2/mean"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("rollout.group_size=1", "a group of one has no baseline"),
        ("trainer.minibatches_per_step=5", "consumer_batch_size 4: a minibatch has whole groups"),
        ("rollout.gconfig={greedy: true}", "rollout.gconfig is greedy"),
        ("rollout.backend=sglang", "name the running servers .*server.backend=sglang"),
        ("rollout.addresses=[a:1]\nserver.backend=vllm", "server.backend is vllm, .* and rollout.addresses names"),
        ("rollout.backend=vllm\nserver.backend=sglang", "rollout.backend is vllm"),
        ("server.backend=sglang", "server.backend is sglang, which is not installed"),
        ("server.args={tp: 2}", "server.args is for sglang and vllm"),
        ("model_path=no/such/model", "no/such/model"),
        ("model_path={truncated}", "^model_path: .*/model.safetensors is not a complete safetensors file: .* cut off"),
        ("reward_model={truncated}", "^reward_model: .*/model.safetensors is not a complete safetensors file"),
        ("reward_model=no/such/judge", "reward_model 'no/such/judge' does not exist"),
        ("trainer.critic={learning_rate: 1.0e-3, model_path: no/such/critic}", "critic.model_path 'no/such"),
        ("trainer.advantage=gae", "trainer.critic"),
        ("trainer.proximal=behaviour\nrollout.gconfig.top_p=0.9", "log-probs of these servers ignore top_p"),
        ("workflow=tests.e2e.agents.LeterAgent", "did you mean 'LetterAgent'?"),
        ("workflow=tests.e2e.agents.rows", "is a function"),
        ("workflow_kwargs={leters: 2}", "workflow_kwargs .'leters'. do not fit"),
        ("seed=-1", "seed: -1.*greater than or equal to 0"),
        ("rollout_cache=/proc/nope", "rollout_cache '/proc/nope' cannot be created"),
        ("trainer.correction.reject=seq_mean_k3", "give a bound for each statistic"),
        ("should_accept_fn=tests.e2e.agents.nothing", "has no 'nothing'"),
        pytest.param(
            "server.device=cuda",
            "server.device is 'cuda' but torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ("reward_model={model_path}", "has no reward head"),
        ("train_dataset={path: no_such.jsonl, kwargs: {size: 3}}", "no_such.jsonl"),
        ("train_dataset.label_key=answer", "no column 'answer'"),
        ("data_packer=tests.e2e.agents.LetterAgent", "must be a subclass of .*DataPacker"),
        ("buffer_filter=tests.e2e.agents.nothing", "has no 'nothing'"),
        (
            "train_dataset={path: 'reasoning-gym:chain_sum', kwargs: {seed: 1, size: 10}}\n"
            "eval_dataset={path: 'reasoning-gym:chain_sum', kwargs: {seed: 2, size: 10}}",
            "set its seed to 11 or more",
        ),
    ],
)
def test_invalid_configs_are_refused_before_anything_starts(run_yaml: Path, overrides: str, says: str) -> None:
    model_path = yaml.safe_load(run_yaml.read_text())["model_path"]
    if "{truncated}" in overrides:
        truncated = shutil.copytree(model_path, run_yaml.parent / "truncated")
        os.truncate(truncated / "model.safetensors", (truncated / "model.safetensors").stat().st_size - 1)
        overrides = overrides.replace("{truncated}", str(truncated))
    overrides = overrides.replace("{model_path}", model_path)
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        train(run_yaml, *overrides.split("\n"))
    assert not (run_yaml.parent / "runs").exists()


def test_sampling_that_the_trainer_cannot_follow_is_named(run_yaml: Path, caplog: pytest.LogCaptureFixture) -> None:
    for changes, says in (
        (["rollout.gconfig.top_p=0.9", "rollout.gconfig.top_k=5", "rollout.gconfig.min_p=0.1"], None),
        (["rollout.gconfig.presence_penalty=0.5"], "rollout.gconfig changes presence_penalty: "),
        (["server.dtype=bfloat16"], "trainer.dtype is float32 and server.dtype bfloat16: .* set server.dtype: float32"),
        (
            ["trainer.dtype=bfloat16"],
            "trainer.dtype is bfloat16 and server.dtype float32: .* set trainer.dtype: float32",
        ),
        (["server.dtype=bfloat16", "trainer.dtype=bfloat16"], None),
    ):
        caplog.clear()
        check_trainable(load_config(run_yaml, changes))
        assert bool(says and re.search(says, caplog.text)) if says else not caplog.text


def test_an_evaluation_does_not_change_the_training_runs_config(served_yaml: Path) -> None:
    with run_directory(load_config(served_yaml), fresh=True) as run_dir:
        trained_with = (run_dir / "config.yaml").read_text()
    with run_directory(load_config(served_yaml, ["seed=2"]), fresh=False, trains=False):
        assert (run_dir / "config.yaml").read_text() == trained_with


def test_a_folder_of_a_run_without_steps_can_be_reused(served_yaml: Path) -> None:
    config = load_config(served_yaml)
    with run_directory(config, fresh=True) as run_dir:
        (run_dir / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n')
    with run_directory(load_config(served_yaml, ["seed=2"]), fresh=True):
        assert not (run_dir / "metrics.jsonl").exists()
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    for other, says in (("seed=3", "seed was 2 and is 3"), ("checkpoint.every_minutes=null", "already holds a")):
        with (
            pytest.raises(ConfigError, match=says),
            run_directory(load_config(served_yaml, ["seed=2", other]), fresh=True),
        ):
            pass


@pytest.mark.parametrize(("agent", "says"), [
    ("BrokenAgent", "RuntimeError: the agent is broken"),
    ("WordyAgent", "the reward is 'good'"),
    ("SilentAgent", "the agent called no model"),
])  # fmt: skip
def test_a_mistake_in_every_episode_stops_the_run_after_its_first_rows(
    served_yaml: Path, agent: str, says: str
) -> None:
    with pytest.raises(EpisodeError, match=f"episodes of the first 3 rows failed: .*{says}.* Nothing was trained"):
        train(served_yaml, f"workflow=tests.e2e.agents.{agent}", "eval_dataset=null")
