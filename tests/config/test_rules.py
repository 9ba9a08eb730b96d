"""Keys that contradict each other across sections, or that nothing would read, are refused by name."""

from __future__ import annotations
from typing import Any
import pytest
from areal_lite.config.dataset_config import ClassConfig, DatasetConfig
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.config.rules import check_rollouts, check_rows_end, held_out_rows
from areal_lite.config.run_config import CheckpointConfig, ClusterConfig, RayConfig, RunConfig
from areal_lite.config.server_config import ServerConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.errors import ConfigError

MINE = ClassConfig(path="mine", name="Mine")
RANKS = ClusterConfig(n_ranks=2)


def config(rows: dict[str, Any], held_out: dict[str, Any] | None = None, **settings: Any) -> RunConfig:
    names: dict[str, Any] = {"experiment_name": "e", "model_path": "m", **settings}
    return RunConfig(
        trainer=TrainerConfig(total_steps=1, learning_rate=1.0),
        train_dataset=DatasetConfig(**{"path": "rows.jsonl", **rows}),
        eval_dataset=None if held_out is None else DatasetConfig(path="held_out.jsonl", **held_out),
        **names,
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"path": ["a.jsonl", "b.jsonl"]}, r"path is \['a.jsonl', 'b.jsonl'\]: write one dotted path"),
        ({"shuffle": True}, "train_dataset.shuffle is True, which needs a dataset: set train_dataset.shuffle: false"),
        ({"max_samples": 3}, "train_dataset.max_samples is 3, which needs a dataset: remove"),
        ({"sampler": MINE}, "train_dataset.sampler is"),
        ({"filter_overlong_prompts": True}, "set train_dataset.filter_overlong_prompts: false"),
    ],
)
def test_what_needs_a_dataset_is_refused_with_a_generator(changes: dict[str, Any], says: str) -> None:
    rows = {"path": "mine.generate", "shuffle": False}
    check_rollouts(config(rows, rollout_global_dataset=False))
    with pytest.raises(ConfigError, match=says):
        check_rollouts(config(rows | changes, rollout_global_dataset=False))


def test_the_rows_of_a_generator_cannot_all_be_run() -> None:
    check_rows_end(config({}))
    with pytest.raises(ConfigError, match="the rows of a generator do not end"):
        check_rows_end(config({}, rollout_global_dataset=False))


def test_an_evaluation_needs_held_out_rows() -> None:
    assert held_out_rows(config({}, {})).path == "held_out.jsonl"
    with pytest.raises(ConfigError, match="eval_dataset is missing: give the rows to evaluate on"):
        held_out_rows(config({}))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"filter_overlong_prompts_workers": 2}, "_workers is 2, but would do nothing: filter_overlong_prompts is"),
        ({"truncation": "left"}, "max_prompt_length is null, so no prompt is too long: set it"),
        (
            {"truncation": "left", "max_prompt_length": 50, "filter_overlong_prompts": True},
            "filter_overlong_prompts drops the prompts that it would cut: remove one",
        ),
    ],
)
def test_keys_of_rows_that_nothing_reads_are_refused(rows: dict[str, Any], says: str) -> None:
    for section, given in (("train_dataset", config(rows)), ("eval_dataset", config({}, rows))):
        with pytest.raises(ConfigError, match=f"^{section}.*{says}"):
            check_rollouts(given)


@pytest.mark.parametrize("settings", [{"data_packer": "mine.Packer"}, {"rows": {"custom_cls": MINE}}])
def test_code_of_the_users_may_read_how_prompts_are_cut(settings: dict[str, Any]) -> None:
    rows = {"truncation": "left"} | settings.pop("rows", {})
    check_rollouts(config(rows, **settings))


@pytest.mark.parametrize("key", ["datagen", "sampler"])
def test_held_out_rows_have_no_generator_and_no_curriculum(key: str) -> None:
    check_rollouts(config({key: MINE}, {}))
    with pytest.raises(ConfigError, match=f"eval_dataset.{key} is .* but would do nothing"):
        check_rollouts(config({}, {key: MINE}))


@pytest.mark.parametrize("opponent", [None, 3, "random", "http://holder:80/v1", ["self", "random"]])
def test_another_opponent_than_an_older_policy_needs_none(opponent: Any) -> None:
    check_rollouts(config({}, workflow="my.Agent", workflow_kwargs={"opponent": opponent}))


@pytest.mark.parametrize("opponent", ["older", ["self", "older"]])
def test_an_older_opponent_needs_an_older_policy(opponent: Any) -> None:
    with pytest.raises(ConfigError, match="opponent is older, and older_policy is null"):
        check_rollouts(config({}, workflow="my.Agent", workflow_kwargs={"opponent": opponent}))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"cluster": ClusterConfig(n_nodes=2)}, "cluster or ray is set, and launch is local"),
        ({"ray": RayConfig(address="10.0.0.2:6379")}, "cluster or ray is set, and launch is local"),
        ({"launch": "ray", "rollout": InferenceEngineConfig(addresses=["a:1"])}, "there is nothing to start"),
        ({"launch": "ray", "cluster": RANKS, "checkpoint": CheckpointConfig(resume="never")}, "Set resume: auto"),
        ({"launch": "ray", "server": ServerConfig(port=30000)}, "server.host or server.port is set"),
        ({"launch": "ray", "server": ServerConfig(host="0.0.0.0")}, "server.host or server.port is set"),
        (
            {
                "launch": "ray",
                "cluster": ClusterConfig(n_gpus_per_node=4),
                "server": ServerConfig(backend="sglang", args={"tp": 8}),
            },
            "n_gpus_per_node is 4, and server.args gives each server 8 GPUs",
        ),
    ],
)
def test_keys_of_a_cluster_that_contradict_others_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_rollouts(config({}, **settings))


def test_a_cluster_with_workers_or_servers_to_start_is_accepted() -> None:
    check_rollouts(config({}, launch="ray", cluster=ClusterConfig(n_nodes=2), ray=RayConfig(address="a:1")))
    check_rollouts(config({}, launch="ray", rollout=InferenceEngineConfig(addresses=["a:1"], workers=2)))
    check_rollouts(config({}, launch="ray", rollout=InferenceEngineConfig(addresses=["a:1"]), cluster=RANKS))
    eight = ServerConfig(backend="sglang", args={"tp": 8})
    check_rollouts(config({}, launch="ray", cluster=ClusterConfig(n_gpus_per_node=8), server=eight))
