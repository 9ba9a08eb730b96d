"""Rows in verl's format: what their dataset section asks for is what servers are asked and what trains."""

from __future__ import annotations
import json
from pathlib import Path
from typing import Any
import datasets
import numpy as np
import pytest
import torch
import yaml
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.loader import load_config
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data import DataProto, DecoderOnlyLLMDataPacker, RLHFDataset, load_tokenizer
from areal_lite.data.batch.collate import collate_fn
from areal_lite.data.batch.data_proto import object_array
from areal_lite.data.rows.loader import ResumableLoader, create_rl_sampler
from areal_lite.data.rows.rl_dataset import create_rl_dataset
from areal_lite.errors import ConfigError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.entry_points import run_evaluation, run_training
from areal_lite.runs.rl_run import num_devices
from areal_lite.servers.programs import server_program
from areal_lite.tools.verify.verify import check_run
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from workflows.single_turn import SingleTurnWorkflow

REWARDS = """
def by_parts(prompt, completion, prompt_ids, completion_ids, data_source, reward_model, **row):
    assert "raw_prompt_ids" not in row and row["extra_info"]["split"] == "train"
    share = sum(c.islower() for c in completion) / 8
    return {"score": share, "acc": completion == reward_model["ground_truth"], "pred": completion[:3]}

def by_token(prompt, completion, prompt_ids, completion_ids, **row):
    return [id % 7 / 7 for id in completion_ids]

def by_tools(prompt, completion, prompt_ids, completion_ids, tools_kwargs, interaction_kwargs, index, **row):
    assert tools_kwargs == row["extra_info"]["tools_kwargs"] and tools_kwargs["calc"]["create_kwargs"]["n"] == index
    assert interaction_kwargs == {} and row["mini_batch"] == 4
    return len(completion) % 3

batches = []

def collate(rows):
    from areal_lite.data.batch.collate import collate_fn
    batches.append([row["index"] for row in rows])
    return collate_fn([{**row, "mini_batch": len(rows)} for row in rows])
"""


@pytest.fixture
def parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a file of rows with verl's columns; prompts have different lengths."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "verl_rewards.py").write_text(REWARDS)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{'Think well. ' * (i % 3)}What is {i} + {i}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"split": "train", "index": i, "answer": str(2 * i), "question": f"What is {i} + {i}?"},
        }
        for i in range(8)
    ]
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


@pytest.fixture
def verl_yaml(served_yaml: Path, parquet: str) -> Path:
    config: dict[str, Any] = yaml.safe_load(served_yaml.read_text())
    config |= {"workflow": "workflows.single_turn.SingleTurnWorkflow", "eval_dataset": None, "save_model": False}
    config |= {"workflow_kwargs": {"reward_fn": "verl_rewards.by_parts"}, "train_dataset": {"path": parquet}}
    config["trainer"]["total_steps"] = 2
    served_yaml.write_text(yaml.safe_dump(config))
    return served_yaml


class SamePacker(DecoderOnlyLLMDataPacker):
    """Sends batches through a DataProto."""


def dumped(run_dir: Path) -> list[dict[str, Any]]:
    return [line for path in run_dir.glob("rollout/*/*.jsonl") for line in json_lines(path)]


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def records(run_dir: Path) -> list[dict[str, Any]]:
    return json_lines(run_dir / "metrics.jsonl")


@pytest.mark.parametrize("workflow", ["single_turn.SingleTurnWorkflow", "multi_turn.MultiTurnWorkflow"])
@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_the_prompt_that_the_dataset_prepares_is_asked_and_trained(
    verl_yaml: Path, parquet: str, workflow: str, truncation: str
) -> None:
    asked = {"max_prompt_length": 30, "truncation": truncation, "return_raw_chat": True, "return_full_prompt": True}
    variables = {"chat_template": "{{ mood }}|{{ messages[0]['content'] }}|", "mood": "calm"}
    rows = {"path": parquet, "apply_chat_template_kwargs": variables, **asked}
    given = [f"train_dataset={json.dumps(rows)}", f"workflow=workflows.{workflow}", "trainer.total_steps=1"]
    config = load_config(verl_yaml, given)
    dataset = RLHFDataset(parquet, load_tokenizer(config.model_path), DatasetConfig(**rows))
    prepared = {item["index"]: item for item in (dataset[i] for i in range(8))}
    assert {len(item["raw_prompt_ids"]) for item in prepared.values()} == {20, 30}  # some are cut
    run_dir = run_training(config).run_dir
    rows_of = {line["task_id"]: line["row"] for line in dumped(run_dir) if "row" in line}
    assert len(rows_of) == 4
    for line in dumped(run_dir):
        row = rows_of[line["task_id"]]
        item = prepared[row["extra_info"]["index"]]
        prompt, answer, *_ = line["turns"]
        assert prompt["ids"] == item["raw_prompt_ids"] == row["raw_prompt_ids"]
        assert sum(answer["loss_mask"]) == len(answer["ids"]) > 0
        assert row["full_prompts"] == f"calm|{row['prompt'][0]['content']}|" == item["full_prompts"]
        assert row["raw_prompt"] == item["raw_prompt"]


def test_a_prompt_that_is_too_long_fails_its_group_with_the_reason(verl_yaml: Path) -> None:
    config = load_config(verl_yaml, ["train_dataset.max_prompt_length=45", "train_dataset.shuffle=false"])
    lines = dumped(run_training(config).run_dir)
    failed = [line for line in lines if line["status"] == "failed"]
    assert {line["row"]["extra_info"]["index"] for line in failed if "row" in line} == {2, 5}
    assert all("the prompt has 57 tokens, and the maximum is 45: raise" in line["error"] for line in failed)
    assert {line["error_kind"] for line in failed} == {"data"}
    assert all(len(line["turns"][0]["ids"]) <= 45 for line in lines if line not in failed)


def test_overlong_rows_are_filtered_and_epochs_count_the_others(verl_yaml: Path) -> None:
    given = ["train_dataset.max_prompt_length=45", "train_dataset.filter_overlong_prompts=true"]
    given += ["trainer.total_steps=null", "trainer.total_epochs=3", "rollout.consumer_batch_size=2"]
    summary = run_training(load_config(verl_yaml, given))
    assert summary.steps == 3 * 6 // 2  # 2 of 8 rows are too long
    assert records(summary.run_dir)[-1]["data/epoch"] == 2
    assert yaml.safe_load((summary.run_dir / "config.yaml").read_text())["trainer"]["total_steps"] == 9
    assert all(len(line["turns"][0]["ids"]) <= 45 for line in dumped(summary.run_dir))
    assert run_training(load_config(verl_yaml, given)).steps == 0
    assert run_training(load_config(verl_yaml, [*given, "trainer.total_epochs=4", "trainer.total_steps=10"])).steps == 1


def test_epochs_without_a_batch_are_refused(verl_yaml: Path) -> None:
    given = ["trainer.total_steps=null", "trainer.total_epochs=1", "rollout.consumer_batch_size=9"]
    with pytest.raises(ConfigError, match="8 training rows are fewer than a batch: lower rollout.consumer_batch_size"):
        run_training(load_config(verl_yaml, given))
    with pytest.raises(ConfigError, match="total_steps and total_epochs are null"):
        load_config(verl_yaml, ["trainer.total_steps=null"])


def test_facts_beside_the_reward_are_dumped_and_measured(verl_yaml: Path, parquet: str) -> None:
    given = ["dump_scores=true", "memory_snapshot_steps=[2]", f"eval_dataset.path={parquet}"]
    run_dir = run_training(load_config(verl_yaml, given)).run_dir
    lines, steps = dumped(run_dir), [line for line in records(run_dir) if "train/loss" in line]
    for line in lines:
        assert line["reward_extra"].keys() == {"acc", "pred"}
        assert line["reward_extra"]["acc"] in (0.0, 1.0)
        assert line["completion"].startswith(line["reward_extra"]["pred"])
    for version, step in enumerate(steps):
        own = [line["reward_extra"]["acc"] for line in lines if line["tail_version"] == version]
        assert step["rollout/reward_extra/acc"] == pytest.approx(sum(own) / len(own))
        tokens = sum(line["seqlen"] for line in lines if line["tail_version"] == version)
        assert step["perf/throughput"] == pytest.approx(tokens / step["timing/step_s"], rel=1e-3)
    assert all("eval-rollout/reward_extra/acc" in line for line in records(run_dir) if "eval/reward" in line)
    scores = json_lines(run_dir / "scores" / "1.jsonl")
    assert all(score["acc"] in (0.0, 1.0) and isinstance(score["pred"], str) for score in scores)
    (snapshot,) = (run_dir / "memory").iterdir()
    held = json.loads(snapshot.read_bytes())
    assert snapshot.name == "step_2.json"
    weights = [each for each in held["tensors"] if each["shape"] == "[259, 32]"]  # embedding, and its two moments
    assert sum(each["count"] for each in weights) >= 3
    assert 0 < held["tensor_bytes"] < held["resident_bytes"] <= held["peak_resident_bytes"]
    assert check_run(run_dir, reward="verl_rewards.by_parts").findings == []
    assert "eval-rollout/reward_extra/acc" in run_evaluation(load_config(verl_yaml, given)).metrics()


def test_arguments_of_tools_and_batches_of_a_collate_fn_reach_the_workflow(verl_yaml: Path, parquet: str) -> None:
    rows = datasets.Dataset.from_parquet(parquet).to_list()
    for row in rows:
        row["extra_info"]["tools_kwargs"] = {"calc": {"create_kwargs": {"n": row["extra_info"]["index"]}}}
    datasets.Dataset.from_list(rows).to_parquet(parquet)
    given = [f"train_dataset={{path: {parquet}, collate_fn: verl_rewards.collate}}", "trainer.total_steps=1"]
    given.append("workflow_kwargs.reward_fn=verl_rewards.by_tools")
    assert run_training(load_config(verl_yaml, given)).steps == 1
    import verl_rewards

    assert verl_rewards.batches and all(len(set(batch)) == 4 for batch in verl_rewards.batches)


def test_throughput_counts_trainers_and_the_gpus_of_servers_that_the_run_starts(
    verl_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_program, "visible_gpus", lambda: ["0", "1", "2", "3", "4"])
    given = ["server.device=auto", "server.replicas=2", "server.args={tp: 2}", "server.backend=sglang"]
    assert num_devices(load_config(verl_yaml, given[:1])) == 1
    assert num_devices(load_config(verl_yaml, [*given, "rollout.addresses=[]"])) == 5


@pytest.mark.parametrize("packer", [None, "tests.e2e.test_verl_rows.SamePacker"])
def test_rewards_of_tokens_are_what_trains(verl_yaml: Path, packer: str | None) -> None:
    given = ["workflow_kwargs.reward_fn=verl_rewards.by_token", "trainer.advantage=reinforce", "dump_training=true"]
    given += ["trainer.advantage_kwargs={gamma: 0.5}", *([f"data_packer={packer}"] if packer else [])]
    run_dir = run_training(load_config(verl_yaml, given)).run_dir
    import pyarrow.parquet

    lines = {(str(line["task_id"]), line["sample_idx"]): line for line in dumped(run_dir)}
    facts = pyarrow.parquet.read_table(run_dir / "training" / "1.parquet").to_pylist()
    assert len(facts) == 16
    for row in facts:
        answer = lines[row["task_id"], row["sample_idx"]]["turns"][1]
        rewards = [id % 7 / 7 for id in answer["ids"]]
        assert answer["rewards"] == pytest.approx(rewards, abs=1e-6)
        returns = [sum(0.5**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
        assert row["advantages"] == pytest.approx(returns, abs=1e-5)
        assert row["reward"] == pytest.approx(sum(rewards), abs=1e-5)
    if packer is not None:
        return
    assert check_run(run_dir).findings == []
    path = next((run_dir / "rollout" / "0").glob("*.jsonl"))
    changed = json_lines(path)
    changed[0]["turns"][1]["rewards"][0] += 0.25
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    found = check_run(run_dir).findings
    assert any("its tokens' rewards sum to" in str(finding) for finding in found)
    assert any("advantages" in str(finding) for finding in found)


def test_the_documents_loop_from_files_to_an_update(tiny_model: Path, tiny_server: str, parquet: str) -> None:
    """RLHFDataset, DataLoader, DataProto, pop, repeat, generate, union, reward, update: verl's fit() by hand."""
    tokenizer = load_tokenizer(str(tiny_model))
    data_config = DatasetConfig(path=parquet, max_prompt_length=100)
    train_dataset = create_rl_dataset(parquet, data_config, tokenizer, None, is_train=True, max_samples=-1)
    assert isinstance(train_dataset, RLHFDataset)
    train_dataloader = ResumableLoader(
        dataset=train_dataset,
        batch_size=4,
        num_workers=0,
        drop_last=True,
        collate_fn=collate_fn,
        sampler=create_rl_sampler(data_config, train_dataset.rows, seed=1),
    )
    gconfig = GenerationHyperparameters(max_new_tokens=4)
    trainer = PolicyTrainer(
        TrainerConfig(total_steps=2, learning_rate=1e-3, dtype="float32", num_threads=1, device="cpu"),
        model_path=str(tiny_model),
        seed=1,
    )
    workflow = SingleTurnWorkflow(half_length, gconfig, tokenizer)
    with RemoteInfEngine(InferenceEngineConfig(addresses=[tiny_server], gconfig=gconfig)) as engine:
        for step, batch_dict in enumerate(train_dataloader):
            batch = DataProto.from_single_dict(batch_dict)
            assert batch.batch["input_ids"].shape == (4, 100)
            assert batch.non_tensor_batch["data_source"].tolist() == ["openai/gsm8k"] * 4
            batch.non_tensor_batch["uid"] = np.array([f"{step}-{i}" for i in range(len(batch))], dtype=object)
            gen_batch = batch.pop(
                batch_keys=["input_ids", "attention_mask", "position_ids"], non_tensor_batch_keys=["raw_prompt_ids"]
            )
            gen_batch = gen_batch.repeat(repeat_times=2, interleave=True)
            batch = batch.repeat(repeat_times=2, interleave=True)
            rows = [{"raw_prompt_ids": ids} for ids in gen_batch.non_tensor_batch["raw_prompt_ids"]]
            groups = engine.rollout_batch(rows, workflow, group_size=1)
            sequences = [group.sequences[0] for group in groups]
            length = max(map(len, sequences))
            output = DataProto.from_single_dict(
                {
                    **{
                        name: torch.stack([padded(getattr(s, name), length) for s in sequences])
                        for name in ("input_ids", "loss_mask", "logprobs", "versions")
                    },
                    "attention_mask": torch.stack([padded(np.ones(len(s)), length) for s in sequences]).bool(),
                    "rewards": torch.tensor([s.reward for s in sequences]),
                    "group_ids": batch.non_tensor_batch["uid"],
                    "task_ids": object_array(str(i) for i in range(len(sequences))),
                }
            )
            batch = batch.union(output)
            for ids, sequence in zip(gen_batch.non_tensor_batch["raw_prompt_ids"], sequences, strict=True):
                assert sequence.input_ids[: len(ids)].tolist() == ids
            version = max(sequence.trained_versions()[1] for sequence in sequences)  # other tests use the server, too
            metrics = trainer.train_step(batch, version=version)
            assert metrics["groups"] == 4
            assert metrics["episodes"] == 8
    assert trainer.steps_done == 2


def padded(column: Any, length: int) -> torch.Tensor:
    values = torch.from_numpy(np.asarray(column))
    return torch.nn.functional.pad(values, (0, length - len(values)))


async def half_length(prompt: str, completion: str, *ids: Any, **row: Any) -> float:
    return len(completion) / 4
