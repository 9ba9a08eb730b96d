"""Training again from the dumps of a run: equal weights, or one sentence that says what is missing."""

from __future__ import annotations
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.cli import main as cli
from areal_lite.config.loader import load_config
from areal_lite.errors import ConfigError
from areal_lite.rollout.dumps.dump_lines import dump_lines, dump_text
from areal_lite.rollout.dumps.packed_group import row_json
from areal_lite.runs.entry_points import run_training
from areal_lite.runs.folder.run_directory import BATCHES, append_batch
from areal_lite.tools.replay.dump_reader import TrainedBatches, read_group
from areal_lite.tools.replay.replay import plan_replay, same_weights


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.advantage=gae", "trainer.critic={learning_rate: 0.01}", "reward_model=JUDGE"],
        ["trainer.advantage=remax", "trainer.lora={rank: 4}", "trainer.kl={coef: 0.01}"],
        [
            "workflow=tests.tools.replay.agents.RewardedTurns",
            "trainer.advantage=turn_grpo",
            "rollout.max_head_offpolicyness=1",
            "trainer.minibatches_per_step=2",
        ],
        ["workflow=tests.tools.replay.agents.RewardedTurns", "trainer.advantage=dr_grpo"],
    ],
    ids=["grpo", "ppo-reward-model", "remax-lora", "async-turns", "sums-of-turns"],
)
def test_an_unchanged_replay_ends_with_the_runs_weights(
    run_yaml: Path,
    plain_run: Path,
    judge: Path,
    overrides: list[str],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = plain_run
    if overrides:
        name = request.node.callspec.id
        overrides = [override.replace("JUDGE", str(judge)) for override in overrides]
        run = run_training(load_config(run_yaml, [f"trial_name={name}", *overrides])).run_dir
    assert cli.main(["replay", str(run)]) == 0
    assert same_weights(run, run.with_name(f"{run.name}-replay")) is True
    assert f"the weights equal those of {run}/model" in capsys.readouterr().out
    assert any(record["train/sequences"] > record["train/episodes"] for record in records(run))  # it has forks


def test_another_learning_rate_gives_other_weights_from_the_same_batches(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in plain_run.rglob("*")}
    arguments = [f"fileroot={tmp_path}", "trainer.learning_rate=1e-3", "trainer.total_steps=5", "dump_training=true"]
    assert cli.main(["replay", str(plain_run), *arguments]) == 0
    copy = tmp_path / "e" / "plain-replay"
    assert same_weights(plain_run, copy) is False
    then, now = (records(run) for run in (plain_run, copy))
    for name in ("train/reward_mean", "train/sequences", "train/trained_tokens", "train/advantage_max"):
        assert [record[name] for record in now] == [record[name] for record in then]
    assert {path: path.stat().st_mtime_ns for path in plain_run.rglob("*")} == before
    assert len(list(copy.glob("training/*.parquet"))) == len(now) == 3
    said = capsys.readouterr().out
    assert f"{plain_run} has the batches of 3 steps, and trainer.total_steps is 5" in said
    assert said.endswith(f"written to {copy}\nnext: areal-lite plot {plain_run} {copy} --out {copy}/metrics.png\n")


def first_dump(run: Path) -> Path:
    return next(path for path in run.glob("rollout/*/*.jsonl") if path.name == "0.jsonl")


def edit(path: Path, then: str, now: str) -> None:
    path.write_text(path.read_text().replace(then, now))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: shutil.rmtree(run / "rollout"), "has no dumps to train from: train the run again with"),
        (lambda run: (run / BATCHES).unlink(), "batches.jsonl is missing, so the groups of each step are unknown"),
        (lambda run: (run / BATCHES).write_text('{"step":1,"ta'), "batches.jsonl has no step"),
        (lambda run: edit(run / BATCHES, "{", "{{"), "batches.jsonl, line 1: not JSON"),
        (lambda run: edit(run / BATCHES, '"step":2', '"step":3'), "line 2 is not the record of a step"),
        (lambda run: first_dump(run).unlink(), "step 1 trained task 0, which has no dump"),
        (lambda run: shutil.copy(first_dump(run), run / "rollout" / "2"), "task 0, which has 2 dumps"),
        (lambda run: edit(first_dump(run), '"timings"', '"'), "0.jsonl, line 1: not JSON: .* Restore it"),
        (lambda run: first_dump(run).write_bytes(first_dump(run).read_bytes()[:-9]), "0.jsonl, line .: not JSON"),
        (lambda run: edit(first_dump(run), '"status"', '"state"'), "line 1 has schema None, which lacks"),
        (lambda run: edit(first_dump(run), '"schema":2', '"schema":1'), "line 1 has schema 1, which lacks"),
        (lambda run: edit(first_dump(run), "accepted", "rejected"), "has no accepted episode"),
        (lambda run: edit(first_dump(run), '"loss_mask":[0,', '"loss_mask":['), "0.jsonl is damaged"),
        (lambda run: edit(run / "config.yaml", "data_packer: null", "data_packer: a.B"), "a.B, whose batches"),
        (lambda run: shutil.rmtree(run), "config.yaml: no such file"),
    ],
)
def test_what_cannot_be_replayed_is_one_sentence_before_anything_loads(
    plain_run: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    run = shutil.copytree(plain_run, tmp_path / "plain")
    plan_replay(run)
    damage(run)
    with pytest.raises(ConfigError, match=message):
        plan_replay(run)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.group_size=2", "only these keys may change: trainer, "),
        ("trial_name=plain", "is the run itself, which is only read"),
        ("trainer.advantage=remax", "needs the reward of a greedy answer per row"),
        ("trainer.minibatches_per_step=9", "a minibatch has whole groups"),
    ],
)
def test_an_override_that_cannot_work_is_refused(plain_run: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_replay(plain_run, [override])


def test_only_an_unchanged_training_is_compared_with_the_runs_weights(plain_run: Path) -> None:
    assert plan_replay(plain_run, ["trial_name=other", "trainer.loss=ppo"]).is_same
    for override in ("seed=7", "trainer.learning_rate=0.1", "trainer.total_steps=2"):
        assert not plan_replay(plain_run, [override]).is_same


# -- the record


def dump(group: Group, run: Path) -> Path:
    """Write a group like the dumper."""
    path = run / "rollout" / "0" / f"{group.task_id}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump_text(dump_lines(group, row=row_json(group.data))))
    return path


def group_of(*episodes: dict[str, Any], task_id: int = 0) -> Group:
    arrays = [{name: torch.tensor(np.array(value)) for name, value in episode.items()} for episode in episodes]
    arrays = [each | {"attention_mask": torch.ones_like(each["input_ids"])} for each in arrays]
    trajectories = [trajectory_of(each, [], member_idx=i) for i, each in enumerate(arrays)]
    identity: dict[str, Any] = {"task_id": task_id, "group_id": str(task_id), "data": {"a": 1}}
    return Group(status=EpisodeStatus.ACCEPTED, trajectories=trajectories, start_version=0, **identity)


def columns(sequence: TokenSequence) -> list[Any]:
    """Return what the trainer reads of a sequence."""
    mask = sequence.loss_mask
    recorded = (sequence.logprobs, sequence.versions, sequence.token_rewards)
    values = [None if v is None else v[mask].tolist() for v in recorded]
    return [sequence.input_ids.tolist(), mask.tolist(), values, sequence.reward, sequence.path, sequence.turn_idx]


def test_a_dump_read_back_has_every_number_of_the_trainer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids, mask = [[1, 2, 7, 8, 3, 9], [1, 2, 7, 8, 4, 9]], [[0, 0, 1, 1, 0, 1]] * 2
    logprobs = -rng.random((2, 6)).astype(np.float32)
    recorded = {"logprobs": logprobs, "versions": [[-1, -1, 3, 4, -1, 4]] * 2}
    given = {"input_ids": ids, "loss_mask": mask, "rewards": [0.1, 1 / 3]}
    by_token = {"input_ids": ids[:1], "loss_mask": mask[:1], "token_rewards": rng.random((1, 6)).astype(np.float32)}
    group = group_of(given | recorded, given, by_token)
    assert group.sequences[1].logprobs is not None
    group.sequences[1].logprobs[3] = np.nan
    read = read_group(dump(group, tmp_path))
    assert read.data == {"a": 1}
    assert [s.member_idx for s in read.sequences] == [0, 0, 1, 1, 2]
    for now, then in zip(read.sequences, group.sequences, strict=True):
        np.testing.assert_equal(columns(now), columns(then))
    group.data = {"image": object()}
    assert read_group(dump(group, tmp_path)).data == {}


def test_tokens_that_were_masked_as_too_old_are_masked_again(tmp_path: Path) -> None:
    arrays = {"input_ids": [[1, 7, 8, 9]], "loss_mask": [[0, 1, 1, 1]], "versions": [[-1, 0, 1, 2]], "rewards": [1.0]}
    group = group_of(arrays)
    dump(group, tmp_path)
    for step in (1, 2, 3):
        append_batch(tmp_path, step, [group])
    batches = TrainedBatches.open(tmp_path, max_staleness=1)
    masks = [[s.loss_mask.tolist() for s in batches.groups(step)[0].sequences] for step in (2, 3)]
    assert masks == [[[False, True, True, True]], [[False, False, True, True]]]
    with pytest.raises(ConfigError, match="step 5 .* cannot have trained task 0: its tokens are older than"):
        append_batch(tmp_path, 4, [group])
        append_batch(tmp_path, 5, [group])
        TrainedBatches.open(tmp_path, max_staleness=0).groups(5)


def test_a_resumed_run_replaces_the_steps_that_it_lost(tmp_path: Path) -> None:
    groups = [Group(task_id=i, group_id=str(i), status=EpisodeStatus.ACCEPTED, data={}) for i in range(9)]
    groups[8].baseline = 0.1 + 0.2
    for step, task in [(1, 0), (2, 1), (3, 2), (2, 3), (3, 8)]:
        append_batch(tmp_path, step, [groups[task]])
    (tmp_path / "rollout" / "0").mkdir(parents=True)
    (tmp_path / "rollout" / "0" / "0.jsonl").touch()
    batches = TrainedBatches.open(tmp_path, max_staleness=0)
    assert [record["task_ids"] for record in batches.records] == [[0], [3], [8]]
    assert batches.records[2]["baselines"] == [0.1 + 0.2]
