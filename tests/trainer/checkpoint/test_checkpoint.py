"""Checkpoints: they load bit for bit as saved, and a run never resumes from the wrong one."""

from __future__ import annotations
import json
import random
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.models.lora import has_adapters
from areal_lite.servers.weights.weight_folder import publish_weights
from areal_lite.trainer.checkpoint.checkpoint import (
    CheckpointWriter,
    check_config,
    checkpoint_step,
    checkpoints,
    find_checkpoint,
)
from areal_lite.trainer.checkpoint.snapshot import restore, snapshot
from areal_lite.trainer.seeding import restore_rng_state, rng_state, seed_process
from tests.trainer.resume_loop import LoopTrainer

BATCHES = [[[5, 6, 7, 8 + step], [9, 4, 3]] for step in range(4)]


def save(trainer: LoopTrainer, root: Path, step: int, files: dict[str, bytes] | None = None) -> Path:
    with CheckpointWriter(root, keep=2) as writer:
        writer.save(step, snapshot(trainer), files or {})
    return root / f"step_{step:08d}"


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all weights", "adapters"])
@pytest.mark.parametrize("kind", ["tiny", "untied"])
def test_training_resumes_bit_for_bit(
    kind: str, lora: dict[str, Any] | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """F49: weights, optimizer, learning rate, counters and random states, all from one checkpoint."""
    model = request.getfixturevalue(kind)
    whole = LoopTrainer(model, lora=lora)
    lines = []
    for step, batch in enumerate(BATCHES, start=1):
        lines.append(whole.train_step(batch))
        if step == 2:
            folder = save(whole, tmp_path, step)
    resumed = LoopTrainer(model, lora=lora)
    restore(resumed, folder)
    assert [resumed.train_step(batch) for batch in BATCHES[2:]] == lines[2:]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_later_training_does_not_change_a_snapshot(tiny: Path) -> None:
    trainer = LoopTrainer(tiny)
    trainer.train_step(BATCHES[0])
    taken = snapshot(trainer)
    tensors = {**taken.learners["policy"].weights, **taken.learners["policy"].optimizer}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    trainer.train_step(BATCHES[1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    own = dict(trainer.model.named_parameters())
    assert not all(torch.equal(own[name], taken.learners["policy"].weights[name]) for name in own)


def test_a_snapshot_has_every_weight_once_and_of_adapters_nothing_else(tiny: Path) -> None:
    trainer, adapted = LoopTrainer(tiny), LoopTrainer(tiny, lora={"rank": 2})
    trainer.train_step(BATCHES[0])
    weights = list(trainer.model.parameters())
    assert snapshot(trainer).num_bytes == sum(3 * weight.nbytes + 4 for weight in weights)  # 4: number of updates
    trainer.model.model.norm.weight.requires_grad_(False)
    assert "model.norm.weight" in snapshot(trainer).learners["policy"].weights
    assert all(".lora_" in name for name in snapshot(adapted).learners["policy"].weights)


def test_a_checkpoint_holds_an_ordinary_model_and_an_optimizer_by_name(tiny: Path, tmp_path: Path) -> None:
    trainer = LoopTrainer(tiny)
    trainer.train_step(BATCHES[0])
    folder = save(trainer, tmp_path, 1, {"data/state.json": b"{}"})
    again = AutoModelForCausalLM.from_pretrained(folder / "policy" / "model", dtype="auto")
    assert again.dtype == torch.float32
    assert "lm_head.weight" not in load_file(folder / "policy" / "model" / "model.safetensors")  # tied: once
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert load_file(folder / "policy" / "optimizer.safetensors").keys() == {
        f"{name}.{kind}" for name, _ in trainer.model.named_parameters() for kind in kinds
    }
    assert checkpoint_step(folder) == 1
    assert (folder / "data" / "state.json").read_bytes() == b"{}"


def test_a_checkpoint_with_adapters_holds_only_adapters(tiny: Path, tmp_path: Path) -> None:
    trainer = LoopTrainer(tiny, lora={"rank": 2})
    assert has_adapters(trainer.model)
    folder = save(trainer, tmp_path, 1) / "policy" / "model"
    assert (folder / "adapter_config.json").is_file()
    assert all(".lora_" in name for name in load_file(folder / "adapter_model.safetensors"))


def test_a_trainer_that_never_updated_can_be_saved(tiny: Path, tmp_path: Path) -> None:
    trainer = LoopTrainer(tiny)
    trainer.learners["policy"].skipped_in_a_row = 2
    folder = save(trainer, tmp_path, 1)
    resumed = LoopTrainer(tiny)
    restore(resumed, folder)
    assert resumed.learners["policy"].skipped_in_a_row == 2
    assert resumed.train_step(BATCHES[0]) == LoopTrainer(tiny).train_step(BATCHES[0])


def test_every_random_generator_is_restored() -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), np.random.normal(), torch.randn(()).item()]

    draw()  # leaves a spare number behind in two of them
    state = json.loads(json.dumps(rng_state()))
    drawn = [draw() for _ in range(3)]
    seed_process(8)
    restore_rng_state(state)
    assert [draw() for _ in range(3)] == drawn


def test_a_rank_beyond_the_saved_number_keeps_its_random_state(tiny: Path, tmp_path: Path) -> None:
    trainer = LoopTrainer(tiny)
    folder = save(trainer, tmp_path, 1)
    (folder / "rng.json").write_text("[]")
    before = rng_state()
    restore(trainer, folder)
    assert rng_state()["python"] == before["python"]


# -- which one a run resumes from ---------------------------------------------------------------------


def test_f56_the_newest_are_kept_and_found(tiny: Path, tmp_path: Path) -> None:
    trainer = LoopTrainer(tiny)
    assert find_checkpoint(tmp_path, "auto") is None
    for step in (1, 2, 11):
        save(trainer, tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000011"]
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "step_00000011"
    with pytest.raises(ConfigError, match="resume is never, and .* already holds a training run"):
        find_checkpoint(tmp_path, "never")
    assert find_checkpoint(tmp_path / "another", "never") is None
    for root, has in ((tmp_path, ".*step_00000002, .*step_00000011"), (tmp_path / "another", "none")):
        with pytest.raises(ConfigError, match=f"'nowhere' is not a folder: .*; this run has {has}$"):
            find_checkpoint(root, "nowhere")
    assert find_checkpoint(tmp_path, str(tmp_path / "step_00000011")) == tmp_path / "step_00000011"


def test_resuming_from_an_older_checkpoint_is_refused_while_later_ones_exist(tiny: Path, tmp_path: Path) -> None:
    trainer = LoopTrainer(tiny)
    for step in (2, 5):
        save(trainer, tmp_path, step)
    early = tmp_path / "step_00000002"
    with pytest.raises(
        CheckpointError, match="step_00000005, later than step 2.*resume=auto to resume from the newest"
    ):
        find_checkpoint(tmp_path, str(early))
    assert find_checkpoint(tmp_path / "another", str(early)) == early
    (tmp_path / "step_00000005").rename(tmp_path / "abandoned_5")
    assert find_checkpoint(tmp_path, str(early)) == early
    with pytest.raises(CheckpointError, match="step_00000002, later than step 1"):
        save(trainer, tmp_path, 2)  # no step is saved twice either


@pytest.mark.parametrize(
    "file",
    ["trainer.json", "rng.json", "policy/optimizer.safetensors", "policy/model/model.safetensors", "data"],
)
def test_f50_a_changed_or_missing_file_is_detected_and_never_skipped(file: str, tiny: Path, tmp_path: Path) -> None:
    trainer = LoopTrainer(tiny)
    for step in (1, 2):
        save(trainer, tmp_path, step, {"data": b"{}"})
    path = tmp_path / "step_00000002" / file
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="newest checkpoint.*changed or cut.*resume from step_00000001"):
        find_checkpoint(tmp_path, "auto")
    path.unlink()
    with pytest.raises(CheckpointError, match="is incomplete"):
        find_checkpoint(tmp_path, "auto")
    with pytest.raises(CheckpointError, match="is incomplete"):
        find_checkpoint(tmp_path, str(path.parents[file.count("/")]))


def test_weights_alone_are_not_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    folder = publish_weights(LoopTrainer(tiny).model, tmp_path / "weights", 3)
    with pytest.raises(CheckpointError, match="v00000003 has no trainer.json.*set model_path"):
        find_checkpoint(tmp_path / "checkpoints", str(folder))


@pytest.mark.parametrize("manifest", ["", "[]", '{"files": []}', '{"files": {"a": 1, "\\ud800": 2}}', "nul"])
def test_f50_a_damaged_manifest_does_not_start_a_new_run(manifest: str, tiny: Path, tmp_path: Path) -> None:
    folder = save(LoopTrainer(tiny), tmp_path, 1)
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="newest checkpoint cannot be used"):
        find_checkpoint(tmp_path, "auto")


def test_a_checkpoint_of_a_later_version_is_refused(tiny: Path, tmp_path: Path) -> None:
    manifest = save(LoopTrainer(tiny), tmp_path, 1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(CheckpointError, match="has schema 2 and this version reads 1"):
        find_checkpoint(tmp_path, "auto")


def test_a_checkpoint_of_another_model_is_refused(tiny: Path, untied: Path, tmp_path: Path) -> None:
    tied, apart = LoopTrainer(tiny), LoopTrainer(untied)
    folder = save(tied, tmp_path, 1)
    apart.model.resize_token_embeddings(300)
    with pytest.raises(CheckpointError, match=r"'model.embed_tokens.weight' was .*259.* and is .*300"):
        restore(apart, folder)


def test_a_checkpoint_of_other_trained_weights_is_refused(tiny: Path, tmp_path: Path) -> None:
    trainer = LoopTrainer(tiny)
    trainer.train_step(BATCHES[0])
    folder = save(trainer, tmp_path, 1)
    head = LoopTrainer(tiny)
    head.model.model.norm.weight.requires_grad_(False)
    head.learners["policy"].optimizer.param_groups[1]["params"].pop()
    with pytest.raises(CheckpointError, match="'model.norm.weight' was trained and is absent"):
        restore(head, folder)
    two = LoopTrainer(tiny)
    two.learners["critic"] = two.learners["policy"]
    with pytest.raises(CheckpointError, match=r"holds \['policy'\] and this run trains \['critic', 'policy'\]"):
        restore(two, folder)


# -- under which config -----------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "model_path": "models/small",
    "seed": 1,
    "fileroot": "runs",
    "trainer": {
        "total_steps": 10,
        "learning_rate": 0.1,
        "num_threads": 1,
        "lora": None,
        "advantage": "grpo",
        "correction": {"max_weight": 5.0},
        "loss_kwargs": {},
    },  # fmt: skip
    "rollout": {"group_size": 4, "consumer_batch_size": 8, "addresses": []},
    "train_dataset": {"path": "rows.jsonl", "shuffle": True},
    "checkpoint": {"every_steps": 1},
}


def with_change(change: dict[str, Any]) -> str:
    config = json.loads(json.dumps(CONFIG))
    for name, value in change.items():
        *sections, key = name.split(".")
        section = config
        for one in sections:
            section = section[one]
        section[key] = value
    return yaml.safe_dump(config)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"trainer.total_steps": 20, "trainer.num_threads": 2, "trainer.a_new_field": 3},
        {"trainer.correction.a_new_field": 3},
        {"rollout.addresses": ["a:1"], "checkpoint.every_steps": 5, "fileroot": "elsewhere"},
        {"train_dataset.path": "elsewhere/rows.jsonl"},
    ],
)
def test_settings_that_do_not_affect_weights_may_change(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    check_config(tmp_path, with_change(change))


def test_every_setting_that_affects_weights_must_match(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    change = {"model_path": "b", "seed": 2, "trainer.lora": {"rank": 4}, "rollout.group_size": 8}
    change |= {"trainer.correction.max_weight": 2.0, "trainer.loss_kwargs.clip_eps": 0.1}
    change |= {"train_dataset.shuffle": False}
    with pytest.raises(ConfigError) as refused:
        check_config(tmp_path, with_change(change | {"trainer.total_steps": 20}))
    assert str(refused.value) == (
        f"{tmp_path} was made with another config: model_path was 'models/small' and is 'b'; rollout.group_size was 4 "
        "and is 8; seed was 1 and is 2; train_dataset.shuffle was True and is False; trainer.correction.max_weight was "
        "5.0 and is 2.0; trainer.lora was None and is {'rank': 4}; trainer.loss_kwargs was {} and is {'clip_eps': 0.1}"
        ". Restore these values to resume, or start another trial_name"
    )


def test_a_checkpoint_without_a_config_is_accepted(tmp_path: Path) -> None:
    check_config(tmp_path, yaml.safe_dump(CONFIG))
    assert checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("key", "then", "now"),
    [
        ("rollout.rewards.weights", {"a": 1.0}, {"a": 2.0}),
        ("rollout.rewards.key", None, "acc"),
        ("rollout.turn_rewards", "last", "mean"),
        ("rollout.agents.train_agents", ["a"], ["b"]),
        ("rollout.tokenizer_path", "a", "b"),
        ("rollout.gconfig.logit_bias", {5: -100}, {7: -100}),
        ("rollout.gconfig.extra", {"a": 1}, {"b": 1}),
        ("buffer_filter", None, "my.filter"),
        ("env", "textarena:A", "textarena:B"),
    ],
)
def test_what_decides_rewards_tokens_and_rows_must_match(key: str, then: Any, now: Any, tmp_path: Path) -> None:
    def config(value: Any) -> str:
        *sections, name = key.split(".")
        values: dict[str, Any] = {name: value}
        for section in reversed(sections):
            values = {section: values}
        return yaml.safe_dump(values)

    (tmp_path / "config.yaml").write_text(config(then))
    with pytest.raises(ConfigError, match="was made with another config: "):
        check_config(tmp_path, config(now))


def test_where_agents_run_may_change(tmp_path: Path) -> None:
    agents = {"isolation": "none", "processes": 2, "sandbox": "none"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"rollout": {"agents": agents}}))
    other = {"isolation": "process", "processes": 4, "sandbox": "bubblewrap"}
    check_config(tmp_path, yaml.safe_dump({"rollout": {"agents": other}}))
