"""A stopped or killed run resumes from its checkpoint: the same weights, the same rows, none twice."""

from __future__ import annotations
import json
import os
import re
import shutil
import signal
import string
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from openai import AsyncOpenAI
from safetensors.torch import load_file
from transformers import AutoTokenizer
from areal_lite.cli import main as cli
from areal_lite.config.loader import load_config
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.files.crash_points import VARIABLE
from areal_lite.runs import stopping
from areal_lite.runs import training_run as loop
from areal_lite.runs.entry_points import run_training
from areal_lite.runs.folder.resuming import CHECKPOINTS
from areal_lite.trainer.checkpoint.checkpoint import checkpoint_step, checkpoints
from tests.fixtures.tiny_model import build_tiny_model

EVERY_STEP = ["checkpoint.every_steps=1", "eval_dataset=null", "save_model=false"]


class Crash(Exception):
    """Stops a run from within."""


def steps_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def cut_last_record(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def rewards(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines()
    return [json.loads(line)["train/reward_mean"] for line in lines]


def trained_rows(run_dir: Path) -> dict[int, list[str]]:
    """Return the questions of the accepted groups by policy version, each once."""
    rows: dict[int, list[str]] = {}
    for path in sorted((run_dir / "rollout").glob("*/*.jsonl")):
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        for line in {json.dumps([r["prompt"], r["task_id"]]): r for r in lines if r["status"] == "accepted"}.values():
            rows.setdefault(int(path.parent.name), []).append(line["prompt"])
    return {version: sorted(prompts) for version, prompts in rows.items()}


def state(run_dir: Path, step: int) -> dict[str, Any]:
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    path = folder / "rollout" / f"global_dataset_state_dict_{step}.json"
    return json.loads(path.read_bytes())  # type: ignore[no-any-return]


def test_a_crashed_run_resumes_and_draws_the_same_rows_as_an_uninterrupted_one(served_yaml: Path) -> None:
    whole = load_config(served_yaml, [*EVERY_STEP, "trial_name=whole", "trainer.total_steps=5"])
    run_training(whole)
    broken = load_config(served_yaml, [*EVERY_STEP, "trial_name=broken", "trainer.total_steps=5"])

    def crash_at_3(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise Crash

    with pytest.raises(Crash):
        run_training(broken, on_step=crash_at_3)
    summary = run_training(broken)
    assert summary.steps == 3
    first = summary.run_dir.parent / "whole"
    assert steps_of(summary.run_dir) == steps_of(first) == [1, 2, 3, 4, 5]
    assert state(summary.run_dir, 5) == state(first, 5)
    # What was sampled after the restart is what would have been sampled without it.
    assert rewards(summary.run_dir) == pytest.approx(rewards(first), abs=1e-6)
    once, twice = trained_rows(first), trained_rows(summary.run_dir)
    assert {v: sorted(set(p)) for v, p in twice.items()} == once  # step 3 ran twice, on the same rows


def test_a_resumed_asynchronous_run_repeats_its_owed_groups(served_yaml: Path) -> None:
    config = load_config(
        served_yaml, [*EVERY_STEP, "trainer.total_steps=4", "rollout.max_head_offpolicyness=2", "seed=3"]
    )

    def crash_at_4(step: int, metrics: dict[str, float]) -> None:
        if step == 4:
            raise Crash

    with pytest.raises(Crash):
        run_training(config, on_step=crash_at_4)
    run_dir = Path(config.fileroot) / "e2e" / "t"
    owed = state(run_dir, 3)["owed"]
    assert owed  # generation ran ahead of the trainer
    run_training(config)
    # 16 rows make one epoch; 4 steps of 4 groups trained each of them once.
    last = state(run_dir, 4)
    ends = Counter(member["position"] for group in last["owed"] + last["buffer"] for member in group)
    assert all(count % 4 == 0 for count in ends.values())
    handed_out = last["group_index"]
    assert len(last["owed"]) + len(last["buffer"]) + 16 == handed_out


WITNESSES = string.ascii_uppercase + string.digits


def witness_rows() -> list[dict[str, str]]:
    """Return rows that each have a character of their own."""
    return [{"question": character} for character in WITNESSES]


class OneForAll:
    """Gives every answer the same reward, so that without a baseline every sample has a gradient."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask once."""
        client = AsyncOpenAI(**extra_kwargs)
        await client.chat.completions.create(model="default", messages=[{"role": "user", "content": data["question"]}])
        return 1.0


def changed_embeddings(before: Path, after: Path) -> set[str]:
    """Return the witnesses whose input embedding is another."""
    tokenizer = load_tokenizer(str(before))
    tables = [load_file(folder / "model.safetensors")["model.embed_tokens.weight"] for folder in (before, after)]
    places = {one: tokenizer.convert_tokens_to_ids(one) for one in WITNESSES}
    return {one for one, place in places.items() if not tables[0][place].equal(tables[1][place])}


def test_t14_a_killed_run_trains_exactly_the_rows_its_data_source_reports(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asynchronous: which rows come in which step may differ after the kill, but none is lost and none trains twice.

    Of one sampled token the embedding gets no gradient, so a row's character changes in training on that row only.
    """
    model = build_tiny_model(tmp_path / "untied", tied=False)
    command = [
        sys.executable,
        "-m",
        "areal_lite",
        "train",
        str(run_yaml),
        *EVERY_STEP,
        "save_model=true",
        "trainer.total_steps=6",
        f"model_path={model}",
        f"workflow={__name__}.OneForAll",
        f"train_dataset.path={__name__}.witness_rows",
        "rollout.max_head_offpolicyness=2",
        "rollout.gconfig.max_new_tokens=1",
        "trainer.advantage=reinforce",
        "trainer.weight_decay=0",
    ]
    run_dir = run_yaml.parent / "runs" / "e2e" / "t"
    crash = os.environ | {VARIABLE: "checkpoint:after_rename:2"}
    killed = subprocess.run(command, env=crash, capture_output=True, timeout=90)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert steps_of(run_dir) == [1, 2, 3, 4, 5, 6]
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step_00000005", "step_00000006"]
    last = state(run_dir, 6)
    left = [group[0]["position"] for group in last["owed"] + last["buffer"]]
    handed_out = last["group_index"]
    assert len(left) == len(set(left)) == handed_out - 6 * 4
    trained = changed_embeddings(model, run_dir / "model")
    assert len(trained) == 6 * 4
    assert not trained & {WITNESSES[place] for place in left}
    assert re.search(rf"resuming after step [2-6] of 6 from {run_dir}/checkpoints/step_0000000[2-6]", done.stderr)
    assert cli.main(command[3:]) == 0
    assert "0 training steps" in capsys.readouterr().out


def test_a_stopped_run_saves_its_last_step(served_yaml: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "areal_lite",
        "train",
        str(served_yaml),
        *EVERY_STEP,
        "checkpoint.every_steps=1000",
        "trainer.total_steps=2000",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as stopped:
        assert stopped.stdout is not None
        for line in stopped.stdout:
            if line.startswith("step    2 "):
                break
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait(timeout=60) == 143
    run_dir = served_yaml.parent / "runs" / "e2e" / "t"
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step_"))
    assert steps_of(run_dir) == list(range(1, step + 1))
    more = [*EVERY_STEP, f"trainer.total_steps={step + 1}"]
    assert run_training(load_config(served_yaml, more)).steps == 1


def test_resume_completes_a_run_stopped_during_evaluation_or_before_its_model_was_saved(
    served_yaml: Path,
) -> None:
    """The records and the model are taken away, as a stop after the checkpoint of step 1 leaves the folder."""
    some = ["checkpoint.every_steps=1", "evaluation.every_steps=1", "trainer.total_steps=1"]
    config = load_config(served_yaml, some)
    run_dir = run_training(config).run_dir
    assert run_training(config).steps == 0
    cut_last_record(run_dir)
    shutil.rmtree(run_dir / "model")
    completed = run_training(config)
    assert (completed.steps, completed.before, steps_of(run_dir)) == (0, None, [0, 1, 1])
    assert completed.after is not None and completed.model_dir is not None and completed.model_dir.is_dir()
    cut_last_record(run_dir)
    run_training(load_config(served_yaml, [*some, "trainer.total_steps=2", "save_model=false"]))
    evaluated = ["eval/reward" in line for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert list(zip(steps_of(run_dir), evaluated, strict=True)) == [
        *((0, True), (1, False), (1, True), (2, False), (2, True))
    ]


def test_resuming_with_other_data_or_without_a_checkpoint_is_refused(served_yaml: Path) -> None:
    one_step = [*EVERY_STEP, "trainer.total_steps=1"]
    summary = run_training(load_config(served_yaml, one_step))
    more = [*EVERY_STEP, "trainer.total_steps=2"]
    with pytest.raises(ConfigError, match="made with another config: seed was 1 and is 2"):
        run_training(load_config(served_yaml, [*more, "seed=2"]))
    with pytest.raises(ConfigError, match="already holds a training run"):
        run_training(load_config(served_yaml, [*more, "checkpoint.resume=never"]))
    with pytest.raises(
        ConfigError, match="'nowhere' is not a folder: it must be auto, never.*this run has .*step_00000001"
    ):
        run_training(load_config(served_yaml, [*more, "checkpoint.resume=nowhere"]))
    checkpoint = summary.run_dir / "checkpoints" / "step_00000001"
    other = run_training(load_config(served_yaml, [*more, "trial_name=u", f"checkpoint.resume={checkpoint}"]))
    assert steps_of(other.run_dir) == [2]
    unsaved = [
        "trial_name=v",
        "checkpoint={every_minutes: null}",
        "save_model=false",
        "trainer.total_steps=1",
        "seed=2",
    ]
    kept = run_training(load_config(served_yaml, unsaved))
    with pytest.raises(ConfigError, match="made with another config: seed was 2 and is 1"):
        run_training(load_config(served_yaml, [*more, "trial_name=v", f"checkpoint.resume={checkpoint}"]))
    assert steps_of(kept.run_dir) == [0, 1, 1]
    whole = checkpoint / "policy" / "model"
    assert AutoTokenizer.from_pretrained(whole).encode("a b") == AutoTokenizer.from_pretrained(
        load_config(served_yaml).model_path
    ).encode("a b")
    (checkpoint / "policy" / "optimizer.safetensors").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="newest checkpoint cannot be used.*step_00000001"):
        run_training(load_config(served_yaml, more))


def test_by_default_a_run_saves_every_10_minutes_and_at_its_end(
    served_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))

    def four_minutes_later(step: int, metrics: dict[str, float]) -> None:
        nonlocal now
        now += 240
        assert stopping.work_left() == [f"step {step}", "a checkpoint"]

    some = ["eval_dataset=null", "save_model=false", "trainer.total_steps=7", "checkpoint.keep=9"]
    run_dir = run_training(load_config(served_yaml, some), on_step=four_minutes_later).run_dir
    assert [checkpoint_step(path) for path in checkpoints(run_dir / CHECKPOINTS)] == [3, 6, 7]


def test_generated_rows_survive_a_restart(served_yaml: Path) -> None:
    makes_rows = [
        "train_dataset.prompt_key=question",
        "train_dataset.datagen={path: tests.e2e.agents, name: MoreQuestions}",
    ]
    config = load_config(served_yaml, [*EVERY_STEP, *makes_rows, "trainer.total_steps=3"])

    def crash_at_2(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise Crash

    with pytest.raises(Crash):
        run_training(config, on_step=crash_at_2)
    run_dir = Path(config.fileroot) / "e2e" / "t"
    before = state(run_dir, 1)["dataset"]["generated"]
    assert len(before) == 2  # one at the start, one after the first step
    run_training(config)
    after = state(run_dir, 3)["dataset"]["generated"]
    assert after[:2] == before
    assert len(after) == 3  # none after the last step
