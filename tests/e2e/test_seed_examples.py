"""Examples of AReaL's, cosmos-rl's and slime's documents, only `areal` renamed, in runs of the tiny model."""

from __future__ import annotations
import asyncio
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import pytest
import torch
import yaml
from areal_lite.utils import stats_tracker
from torch.utils.data import Dataset
import areal_lite
from areal_lite.api import AsyncRewardWrapper, ModelRequest
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.loader import load_config
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.packer.data_packer import DataPacker
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
from areal_lite.errors import ConfigError
from areal_lite.rollout import workflow_context
from areal_lite.runs.entry_points import run_rollout, run_training
from areal_lite.runs.run_data import training_data
from tests.e2e.agents import LetterAgent

QUIET = ["save_model=false", "trainer.total_steps=1", "trial_name=quiet", "eval_dataset=null"]


def prompts(size: int = 8) -> list[dict[str, str]]:
    """Return rows with the column of AReaL's example."""
    return [{"prompt": f"say {i}"} for i in range(size)]


class MyWorkflow(RolloutWorkflow):
    def __init__(self, tokenizer, gconfig, **kwargs):
        self.tokenizer = tokenizer
        self.gconfig = gconfig

    async def arun_episode(self, engine, data):
        # 1. Prepare input
        input_ids = self.tokenizer.encode(data["prompt"])

        # 2. Generate completion
        req = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=input_ids,
            gconfig=self.gconfig,
            tokenizer=self.tokenizer,
        )
        resp = await engine.agenerate(req)

        # 3. Compute reward
        reward = self.compute_reward(resp, data)

        # 4. Return tensor dict (or None to reject)
        if reward < 0:
            return None

        return self.build_tensor_dict(resp, reward)

    def compute_reward(self, resp: Any, data: dict[str, Any]) -> float:
        # Get current execution context
        ctx = workflow_context.get()
        assert ctx.task_id is not None
        assert self.gconfig.greedy == ctx.is_eval
        # Get stats scope based on mode ("rollout" or "eval-rollout")
        scope = workflow_context.stat_scope()
        reward = sum(c.islower() for c in self.tokenizer.decode(resp.output_tokens)) / 8
        stats_tracker.get(scope).scalar(reward=reward, length=resp.output_len)
        return reward

    def build_tensor_dict(self, resp: Any, reward: float) -> dict[str, torch.Tensor]:
        prompt = [0] * resp.input_len
        return {
            "input_ids": torch.tensor([resp.input_tokens + resp.output_tokens], dtype=torch.int32),
            "attention_mask": torch.ones(1, resp.input_len + resp.output_len, dtype=torch.bool),
            "loss_mask": torch.tensor([prompt + [1] * resp.output_len], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0] * resp.input_len + resp.output_logprobs], dtype=torch.float32),
            "rewards": torch.tensor([reward], dtype=torch.float32),
            "versions": torch.tensor([prompt + resp.output_versions], dtype=torch.int32),
        }


@pytest.fixture
def areal_yaml(served_yaml: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a YAML with the document's `rollout` section, and no workflow."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model/tokenizer")
    config = yaml.safe_load(served_yaml.read_text())
    for name in ("fileroot", "workflow"):
        del config[name]
    of_document = f"""
rollout:
  dump_to_file: true
  fileroot: "{tmp_path}/path/to/logs"
  tokenizer_path: "model/tokenizer" # Required for text decoding
"""
    config["rollout"] |= yaml.safe_load(of_document)["rollout"]
    for name in ("train_dataset", "eval_dataset"):
        config[name] = {"path": "tests.e2e.test_seed_examples.prompts"}
    config["trainer"]["total_steps"] = 2
    served_yaml.write_text(yaml.safe_dump(config))
    return served_yaml


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def test_areals_workflow_trains_from_its_class_and_dumps_where_its_yaml_says(areal_yaml: Path, tmp_path: Path) -> None:
    config = load_config(areal_yaml)
    tokenizer = load_tokenizer("model/tokenizer")
    trainer = areal_lite.Trainer(config)
    summary = trainer.train(
        workflow=MyWorkflow,
        workflow_kwargs={
            "tokenizer": tokenizer,
            "gconfig": config.gconfig,
        },
    )
    assert summary.steps == 2 and summary.after is not None
    logs = tmp_path / "path/to/logs" / config.experiment_name / config.trial_name
    assert summary.run_dir == logs
    for folder in ("rollout/0", "rollout/1", "eval-rollout/0", "eval-rollout/2"):
        record = json.loads(next((logs / folder).glob("*.jsonl")).read_text().splitlines()[0])
        assert {"task_id", "sample_idx", "seqlen", "prompt_len", "reward", "prompt", "completion"} <= record.keys()
        assert record["head_version"] == record["tail_version"] == int(folder[-1])
    for line in steps_of(logs):
        if "eval/reward" in line:
            assert line["eval-rollout/reward"] == pytest.approx(line["eval/reward"])
        else:
            assert line["rollout/reward"] == pytest.approx(line["train/reward_mean"])
            assert 1 <= line["rollout/length"] <= 8
    recorded = yaml.safe_load((logs / "config.yaml").read_text())
    assert recorded["workflow"] == f"{__name__}.MyWorkflow"
    assert recorded["workflow_kwargs"] == {"tokenizer": "model/tokenizer"}


def test_a_workflow_is_an_instance_a_class_a_path_or_an_agent(
    areal_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(areal_yaml, QUIET)

    class Local(MyWorkflow):
        """Has no dotted path."""

    def trains(workflow: Any, **kwargs: Any) -> None:
        steps: list[int] = []
        again = load_config(areal_yaml, [*QUIET, f"trial_name=t{uuid.uuid4().hex[:8]}", *kwargs.pop("overrides", [])])
        trainer = areal_lite.Trainer(again)
        trainer.train(workflow=workflow, on_step=lambda step, metrics: steps.append(step), **kwargs)
        assert steps == [1]

    trains(Local(load_tokenizer("model/tokenizer"), config.gconfig))
    trains(Local)  # tokenizer and gconfig are filled in
    trains(f"{__name__}.MyWorkflow", workflow_kwargs={"unused": 1})
    trains(None, overrides=[f"workflow={__name__}.MyWorkflow"])
    questions = ["train_dataset.path=tests.e2e.agents.rows"]
    trains(LetterAgent(), overrides=questions)
    assert capsys.readouterr().out == ""
    areal_lite.Trainer(areal_yaml, *QUIET).train(workflow=Local)
    assert "reward" in capsys.readouterr().out


def test_a_workflow_that_cannot_train_fails_before_anything_starts(areal_yaml: Path) -> None:
    trainer = areal_lite.Trainer(areal_yaml, *QUIET)
    with pytest.raises(ConfigError, match="workflow is missing: name a class in the YAML .* or pass it from Python"):
        trainer.train()
    with pytest.raises(ConfigError, match="MyWorkflow is already an instance, so workflow_kwargs"):
        trainer.train(MyWorkflow(None, None), {"tokenizer": None})
    with pytest.raises(ConfigError, match="workflow_kwargs .* do not fit its constructor"):
        trainer.train(LetterAgent, {"temperature": 1})
    with pytest.raises(ValueError, match="overrides .* come with a loaded config"):
        areal_lite.Trainer(trainer.config, "seed=2")
    assert not trainer.config.run_dir.exists()


def test_an_awaited_run_takes_a_workflow_too(areal_yaml: Path) -> None:
    assert asyncio.run(areal_lite.train(areal_yaml, *QUIET, workflow=MyWorkflow)).steps == 1


# -- cosmos-rl: rows that are text or conversations, and a packer of the user's own ----------------

CONVERSATION = [
    {
        "role": "user",
        "content": "What is the capital of France?",
    },
]


class Texts(Dataset[Any]):
    """Rows are raw text prompts."""

    def __init__(self, data_files: Any, tokenizer: Any, processor: Any, config: DatasetConfig) -> None:
        self.rows_ = [f"say {i}" for i in range(8)]

    def __len__(self) -> int:
        return len(self.rows_)

    def __getitem__(self, index: int) -> Any:
        return self.rows_[index]


class Conversations(Texts):
    """Rows are conversation lists."""

    def __getitem__(self, index: int) -> Any:
        return CONVERSATION


def texts() -> list[str]:
    """Return rows that are text."""
    return [f"say {i}" for i in range(8)]


class Prompted(MyWorkflow):
    """Keeps the prompts that it gets."""

    seen: list[Any] = []

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        Prompted.seen.append(data["prompt"])
        return await super().arun_episode(engine, data)


@pytest.fixture
def cosmos_yaml(areal_yaml: Path) -> Path:
    config = yaml.safe_load(areal_yaml.read_text())
    config["workflow"] = f"{__name__}.Prompted"
    del config["eval_dataset"]
    areal_yaml.write_text(yaml.safe_dump(config))
    Prompted.seen.clear()
    return areal_yaml


@pytest.mark.parametrize(
    ("rows", "prompt"),
    [
        (f"train_dataset.custom_cls={{path: {__name__}, name: Texts}}", "say "),
        (f"train_dataset.custom_cls={{path: {__name__}, name: Conversations}}", "capital of France"),
        (f"train_dataset.path={__name__}.texts", "say "),
    ],
)
def test_rows_of_text_and_conversations_train_as_they_roll_out(cosmos_yaml: Path, rows: str, prompt: str) -> None:
    config = load_config(cosmos_yaml, [rows, "trainer.total_steps=1", "save_model=false"])
    assert run_training(config).steps == 1
    trained, Prompted.seen[:] = set(Prompted.seen), []
    run_rollout(config)
    assert trained <= set(Prompted.seen)
    assert all(isinstance(one, str) and prompt in one for one in trained)
    assert any("<|im_start|>" in one for one in trained) == ("capital" in prompt)


class MyPacker(DataPacker):
    """The hooks of the document, with their signatures."""

    batches: list[int] = []
    calls: Counter[str] = Counter()

    def get_rollout_input(self, item: Any) -> Any:
        self.calls["rollout input"] += 1
        return self.packer.get_rollout_input(item)

    def rollout_collate_fn(self, items: list[Any]) -> list[Any]:
        MyPacker.batches.append(len(items))
        return items

    def get_policy_input(self, sample: Any, rollout_output: str) -> Any:  # type: ignore[override]
        self.calls["policy input"] += 1
        assert sample == CONVERSATION
        return self.packer.get_policy_input(sample, rollout_output)

    def policy_compute_max_len(self, processed_samples: Any) -> int:
        return max(len(x) for x in processed_samples)

    def policy_collate_fn(self, processed_samples: Any, computed_max_len: int) -> dict[str, Any]:
        self.calls["collate"] += 1
        return self.packer.policy_collate_fn(processed_samples, computed_max_len + 3)

    @property
    def packer(self) -> DecoderOnlyLLMDataPacker:
        packer = DecoderOnlyLLMDataPacker()
        packer.setup(tokenizer=self.tokenizer, config=self.config)
        return packer


def test_cosmos_rls_packer_gets_mini_batches_of_conversations_and_packs_them(cosmos_yaml: Path) -> None:
    MyPacker.batches.clear()
    MyPacker.calls.clear()
    rows = f"train_dataset.custom_cls={{path: {__name__}, name: Conversations}}"
    config = load_config(cosmos_yaml, [rows, f"data_packer={__name__}.MyPacker", "save_model=false"])
    assert run_training(config).steps == 2
    size = config.rollout.consumer_batch_size
    assert set(MyPacker.batches) == {size} and len(MyPacker.batches) == 2
    assert MyPacker.calls["policy input"] == 2 * size * config.rollout.group_size
    assert MyPacker.calls["collate"] == 2


def test_a_collating_packer_and_a_curriculum_are_refused(cosmos_yaml: Path) -> None:
    sampler = "train_dataset.sampler={path: tests.e2e.agents, name: InOrder}"
    with pytest.raises(ConfigError, match="MyPacker has a rollout_collate_fn, which takes .*: remove one of the two"):
        run_training(load_config(cosmos_yaml, [f"data_packer={__name__}.MyPacker", sampler]))
    collate = "train_dataset.collate_fn=areal_lite.data.batch.collate.collate_fn"
    with pytest.raises(ConfigError, match="train_dataset has a collate_fn, which takes .*: remove one of the two"):
        run_training(load_config(cosmos_yaml, [collate, sampler]))


def test_a_model_that_reads_images_is_refused_by_name(cosmos_yaml: Path, tiny_model: Path, tmp_path: Path) -> None:
    vision = tmp_path / "vision"
    shutil.copytree(tiny_model, vision)
    described = json.loads((vision / "config.json").read_text()) | {
        "model_type": "gemma3",
        "vision_config": {"a": 1},
    }
    (vision / "config.json").write_text(json.dumps(described))
    config = load_config(cosmos_yaml, [f"model_path={vision}"])
    with pytest.raises(ConfigError, match=r"vision' is a gemma3 model, whose images are not computed here"):
        run_training(config)
    assert not config.run_dir.exists()


# -- slime: rows from a generator, and metadata of the buffer --------------------------------------


def endless(first: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows for ever."""
    number = first
    while True:
        yield {"prompt": f"say {number}", "facts": {"number": number}}
        number += 1


def counting_filter(source: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """Count the groups that come back, in the source's metadata."""
    taken = sorted(buffer, key=lambda group: group[0].metadata["number"])[:num_samples]
    source.update_metadata({"returned": source.get_metadata().get("returned", 0) + len(taken)})
    return taken


def test_rows_of_a_generator_train_and_the_buffers_metadata_survive_a_restart(cosmos_yaml: Path) -> None:
    given = [
        "rollout_global_dataset=false",
        f"train_dataset={{path: {__name__}.endless, shuffle: false, metadata_key: facts}}",
        f"buffer_filter={__name__}.counting_filter",
        "rollout.over_sampling_groups=2",
        "checkpoint={every_steps: 1}",
        "save_model=false",
    ]
    first = run_training(load_config(cosmos_yaml, [*given, "trainer.total_steps=2"]))
    half = steps_of(first.run_dir)[-1]["data/metadata/returned"]
    assert half > 0
    assert run_training(load_config(cosmos_yaml, [*given, "trainer.total_steps=4"])).steps == 2
    lines = steps_of(first.run_dir)
    returned = [line["data/metadata/returned"] for line in lines if "data/metadata/returned" in line]
    assert returned == sorted(returned) and returned[-1] > half
    trained = [json.loads(line)["task_ids"] for line in (first.run_dir / "batches.jsonl").read_bytes().splitlines()]
    assert len(trained) == 4
    rows = Counter(prompt for prompt in Prompted.seen)
    assert set(rows) == {f"say {number}" for number in range(len(rows))} and len(rows) >= 16
    with pytest.raises(ConfigError, match="the rows of a generator do not end"):
        run_rollout(load_config(cosmos_yaml, given))


def test_epochs_of_a_generator_are_refused(cosmos_yaml: Path) -> None:
    rows = f"train_dataset={{path: {__name__}.endless, shuffle: false}}"
    config = load_config(cosmos_yaml, ["rollout_global_dataset=false", rows, "trainer.total_epochs=1"])
    with pytest.raises(ConfigError, match="total_epochs is 1, and rollout_global_dataset is false"):
        run_training(config)


def facts() -> list[dict[str, Any]]:
    """Return rows with a column of metadata."""
    return [{"prompt": f"say {i}", "facts": {"number": i}} for i in range(8)]


class WithMetadata(Prompted):
    """Reads the metadata of its row."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        assert data["prompt"] == f"say {data['metadata']['number']}" and data["metadata"] == data["facts"]
        return await super().arun_episode(engine, data)


def test_metadata_reach_the_workflow_without_a_filter(cosmos_yaml: Path) -> None:
    rows = [f"{name}={{path: {__name__}.facts, metadata_key: facts}}" for name in ("train_dataset", "eval_dataset")]
    config = load_config(cosmos_yaml, [*rows, f"workflow={__name__}.WithMetadata", *QUIET[:3]])
    (step,) = steps_of(run_training(config).run_dir)[-1:]
    assert step["eval/reward"] > 0


class MakesPrompts(Prompted):
    """Makes its own prompts, from nothing."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        assert data == {}
        return await super().arun_episode(engine, {"prompt": f"task {workflow_context.get().task_id}"})


def test_a_workflow_makes_its_own_prompts_for_empty_samples(cosmos_yaml: Path) -> None:
    given = [
        "rollout_global_dataset=false",
        "train_dataset={path: areal_lite.data.source.row_streams.empty_rows, shuffle: false}",
        f"workflow={__name__}.MakesPrompts",
        "checkpoint={every_steps: 1}",
        "save_model=false",
        "eval_dataset=null",
    ]
    data = training_data(load_config(cosmos_yaml, given))
    first, second = data.source.get_samples(2)
    size = load_config(cosmos_yaml, given).rollout.group_size
    assert [sample.index for sample in first + second] == list(range(2 * size))
    assert {(sample.prompt, sample.response, sample.label, str(sample.metadata)) for sample in first} == {
        ("", "", None, "{}")
    }
    assert run_training(load_config(cosmos_yaml, [*given, "trainer.total_steps=1"])).steps == 1
    seen = set(Prompted.seen)
    resumed = run_training(load_config(cosmos_yaml, [*given, "trainer.total_steps=2"]))
    assert (resumed.steps, seen < set(Prompted.seen)) == (1, True)
    assert all(prompt.startswith("task ") for prompt in Prompted.seen)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"train_dataset={{path: {__name__}.facts, metadata_key: fact}}", "no column 'fact' .metadata_key.*'facts'?"),
        ("rollout_global_dataset=false", "train_dataset.shuffle is True, which needs a dataset"),
    ],
)
def test_a_key_without_an_effect_is_refused(cosmos_yaml: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_training(load_config(cosmos_yaml, [override]))


def as_score(reward: float) -> dict[str, Any]:
    """Return what an agent's own reward function does, whatever part of the agent's dict trains."""
    return {"score": reward}


class Judged(LetterAgent):
    """Rewards with parts, one of them text."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        """Ask once and score."""
        reward = await AsyncRewardWrapper(as_score, in_process=True)(await super().run(data, **extra_kwargs))
        return {"letters": reward, "length": 8, "verdict": "fine"}


def test_the_reward_key_chooses_the_part_that_trains(cosmos_yaml: Path) -> None:
    agent = [f"workflow={__name__}.Judged", "train_dataset.path=tests.e2e.agents.rows", "rollout.rewards.key=letters"]
    config = load_config(cosmos_yaml, [*agent, *QUIET[:3]])
    (step,) = steps_of(run_training(config).run_dir)
    assert step["rollout/reward/letters"] == pytest.approx(step["train/reward_mean"])
    assert step["rollout/reward/length"] == 8
    with pytest.raises(ConfigError, match="rewards.key is 'letters' and rollout.rewards.weights {'a': 1.0}"):
        run_training(load_config(cosmos_yaml, [*agent, "rollout.rewards.weights={a: 1}"]))
    with pytest.raises(ConfigError, match="Judged is an agent, whose messages the chat template writes"):
        run_training(load_config(cosmos_yaml, [*agent, "train_dataset.apply_chat_template=false"]))


def letters_and_length(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
) -> dict[str, Any]:
    """Reward with parts, none of which is the score."""
    return {"letters": sum(c.islower() for c in completions) / 8, "length": len(completion_ids), "verdict": "fine"}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_reward_key_chooses_the_part_of_a_workflows_reward_function(cosmos_yaml: Path, workers: int) -> None:
    single = [
        "workflow=workflows.single_turn.SingleTurnWorkflow",
        f"workflow_kwargs={{reward_fn: {__name__}.letters_and_length}}",
        "rollout.rewards.key=letters",
        f"rollout.workers={workers}",
        *QUIET[:3],
    ]
    (step,) = steps_of(run_training(load_config(cosmos_yaml, single)).run_dir)
    assert step["rollout/reward/letters"] == pytest.approx(step["train/reward_mean"])
    assert step["rollout/reward_extra/length"] > 1


def length(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """Reward long answers, and check that the prompt is the row's text."""
    assert prompt.startswith("say ") and "<|im_start|>" not in prompt
    assert len(prompt_ids) == len(prompt)  # the tiny model has one token per byte
    return float(len(completion_ids))


@pytest.mark.parametrize(
    "rows",
    [f"{{path: {__name__}.prompts, apply_chat_template: false}}", f"{{path: {__name__}.texts}}"],
)
def test_prompts_without_the_chat_template_are_asked_as_they_are(cosmos_yaml: Path, rows: str) -> None:
    single = [
        "workflow=workflows.single_turn.SingleTurnWorkflow",
        f"workflow_kwargs={{reward_fn: {__name__}.length}}",
        f"train_dataset={rows}",
        *QUIET[:3],
    ]
    assert run_training(load_config(cosmos_yaml, single)).steps == 1
