"""Every numbered example runs as its docstring says, with a tiny random model, in its own folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
import pytest
import torch
from areal_lite.api import InferenceEngineConfig, ModelRequest, RolloutWorkflow
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.fixtures.tiny_vlm import save_tiny_vlm
from tests.stub_server import StubServer, StubThread

REPOSITORY = Path(__file__).parents[2]
NUMBERED = sorted((REPOSITORY / "examples").glob("[0-9]*.py"))


def run_example(name, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / name), *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.name)
def test_an_example_is_short_and_shows_its_command(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 60
    assert any(f"python examples/{path.name}" in line for line in lines[:6])


def test_every_numbered_example_has_a_test():
    tested = set(re.findall(r'run_example\(\s*"(.*?)"', Path(__file__).read_text()))
    assert tested == {path.name for path in NUMBERED}


def test_01_gives_a_group_of_four_for_each_row(tiny_model, tmp_path):
    lines = run_example("01_engine_and_workflow.py", tiny_model, cwd=tmp_path).splitlines()
    assert len(lines) == 3
    assert re.match(r"'Once upon a time': accepted, ids \[4, \d+\], rewards \[", lines[0])


def test_02_trains_the_answers_of_both_calls(tiny_model, tmp_path):
    lines = run_example("02_agent_openai_sdk.py", tiny_model, cwd=tmp_path).splitlines()
    assert len(lines) == 2
    for line in lines:
        trained = re.search(r"trained tokens \[(.*)\]", line)[1].split(", ")
        assert len(trained) == 4 and max(map(int, trained)) > 24  # more than one answer has


def test_03_trains_from_a_yaml(tiny_model, tmp_path):
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    printed = run_example(
        "03_train_from_yaml.py",
        tiny_model,
        "rollout.group_size=2",
        "rollout.consumer_batch_size=2",
        "eval_dataset.kwargs.size=2",
        cwd=tmp_path,
    )
    assert "step 2  train/reward_mean" in printed
    assert "held-out reward 0.00 -> 0.00" in printed
    (run_dir,) = (tmp_path / "runs/train_from_yaml").iterdir()
    assert f"written to {run_dir.relative_to(tmp_path)}" in printed
    assert (run_dir / "model/model.safetensors").exists()


def test_04_accepts_a_group_only_if_its_rewards_differ(tiny_model, tmp_path):
    lines = run_example("04_custom_reward_filter.py", tiny_model, cwd=tmp_path).splitlines()
    assert len(lines) == 3
    for line in lines:
        assert re.search(r"accepted  \[|rejected  .*should_accept_fn", line), line
        if rewards := re.search(r"accepted  \[(.*)\]", line):
            assert len(set(rewards[1].split(", "))) > 1


class OneAnswer(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        answer = await engine.agenerate(ModelRequest(input_ids=data["ids"]))
        prompt_len, answer_len = answer.input_len, answer.output_len
        return {
            "input_ids": torch.tensor([answer.input_tokens + answer.output_tokens]),
            "attention_mask": torch.ones(1, prompt_len + answer_len, dtype=torch.bool),
            "loss_mask": torch.tensor([[0] * prompt_len + [1] * answer_len]),
            "logprobs": torch.tensor([[0.0] * prompt_len + answer.output_logprobs]),
            "versions": torch.tensor([[-1] * prompt_len + answer.output_versions]),
            "rewards": torch.tensor([1.0]),
        }


def test_05_shows_dumped_episodes(tmp_path):
    with StubThread(StubServer(answer_len=8)) as stub:
        config = InferenceEngineConfig(
            backend="sglang", addresses=[stub.address], fileroot=str(tmp_path / "runs"), dump_to_file=True
        )
        with RemoteInfEngine(config) as engine:
            engine.rollout_batch([{"ids": [5, 6, 7]}] * 3, OneAnswer(), group_size=2)
    (dumps,) = (tmp_path / "runs").rglob("rollout")
    printed = run_example("05_read_the_dump.py", tmp_path / "runs", cwd=tmp_path)
    assert run_example("05_read_the_dump.py", dumps, cwd=tmp_path) == printed
    assert "3 groups, 6 lines: {'accepted': 6}" in printed
    assert "version 0: mean reward 1.000 over 6" in printed
    assert "prompt: 3 tokens, 0 trained" in printed
    assert re.search(r"assistant: 8 tokens, 8 trained, mean log-prob -0\.\d+, versions \[0\]", printed)


DUMPED = {
    "task_id": 7, "group_id": "7", "sample_idx": 0, "member_idx": 0, "status": "accepted", "error": None,
    "seqlen": 3, "prompt_len": 1, "start_version": 2, "head_version": 2, "tail_version": 2, "reward": 0.5,
    "prompt": None, "completion": None, "timings": {"queued_s": 0.0, "run_s": 0.1, "finished_at": 9.0},
}  # fmt: skip
PROMPT = {"role": "prompt", "start": 0, "ids": [4], "text": None, "loss_mask": [0]}
ANSWER = {
    "role": "assistant", "start": 1, "ids": [5, 6], "text": None, "loss_mask": [1, 1], "logprobs": [-1.0, -2.0],
    "versions": [2, 2], "stop_reason": "stop", "started": 8.0, "latency_s": 0.1,
}  # fmt: skip
SCHEMA_1 = DUMPED | {"schema": 1, "turns": [PROMPT, ANSWER]}
SCHEMA_2 = DUMPED | {
    "schema": 2,
    "error_kind": None,
    "error_type": None,
    "turns": [PROMPT | {"turn_idx": 0, "parent_idx": None}, ANSWER | {"turn_idx": 1, "parent_idx": 0}],
}


@pytest.mark.parametrize("line", [SCHEMA_1, SCHEMA_2], ids=["schema 1", "schema 2"])
def test_05_reads_a_dump_of_either_schema(tmp_path, line):
    path = tmp_path / "rollout" / "2" / "7.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(line) + "\n")
    printed = run_example("05_read_the_dump.py", tmp_path, cwd=tmp_path)
    assert "1 groups, 1 lines: {'accepted': 1}" in printed
    assert "assistant: 2 tokens, 2 trained, mean log-prob -1.50, versions [2], ended by stop" in printed


def test_06_trains_step_by_step(tiny_model, tmp_path):
    lines = run_example("06_own_training_loop.py", tiny_model, 2, cwd=tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"]
    assert all(re.search(r"reward \d\.\d+, loss [+-]\d", line) for line in lines)


def test_07_trains_and_checks_the_answers(tiny_model, tmp_path):
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    printed = run_example("07_sft.py", tiny_model, "train_dataset.kwargs.size=8", "trainer.epochs=1", cwd=tmp_path)
    assert "step     1  loss " in printed
    assert re.search(r"0 of 8 answers memorized and ended; written to runs/sft/\d+-\d+", printed)


def test_08_runs_two_batches_and_a_row_in_one_event_loop(tiny_model, tmp_path):
    lines = run_example("08_async_engine.py", tiny_model, cwd=tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "Who are you?",
        "What is rain?",
        "And snow?",
        "Why?",
    ]
    assert all(re.search(r": accepted, rewards \[[01]\.0\]", line) for line in lines)


def test_09_trains_on_the_rows_that_it_submits(tiny_model, tmp_path):
    lines = run_example("09_submit_and_wait.py", tiny_model, 2, cwd=tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"]
    assert all(re.search(r"reward \d\.\d+, loss [+-]\d", line) for line in lines)


def test_10_reads_pictures_that_the_model_has_not_seen(tmp_path):
    save_tiny_vlm(tmp_path / "model")
    few = ["trainer.total_steps=2", "trainer.device=cpu", "train_dataset.kwargs.size=64", "eval_dataset.kwargs.size=4"]
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    printed = run_example("10_vision_sft.py", tmp_path / "model", "count", *few, cwd=tmp_path)
    assert re.search(r"^[01]\.\d+ of new pictures answered\n[01]\.\d+ of blank ones$", printed, re.MULTILINE)
