"""``env`` in a YAML gives the workflow and the rows."""

from __future__ import annotations
import sys
from pathlib import Path
from typing import Any
import pytest
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.data.rows.load_rows import load_rows
from areal_lite.environments import catalog
from areal_lite.errors import ConfigError
from areal_lite.runs.entry_points import check_held_out

OWN = "tests.environments.games.Dice"


def test_one_line_gives_the_loop_and_separate_rows(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(env="textarena:Wordle-v0", seed=5)
    assert config.workflow == catalog.AGENT
    assert config.workflow_kwargs == {"env": "textarena:Wordle-v0", "seed": 5}
    assert config.train_dataset.path == config.eval_dataset.path == "textarena:Wordle-v0"
    assert (config.train_dataset.kwargs, config.eval_dataset.kwargs) == (
        {"size": 1000, "seed": 0},
        {"size": 100, "seed": 1_000_000},
    )
    check_held_out(config.train_dataset, config.eval_dataset)
    easier = {"train_dataset": {"kwargs": {"hard": 0, "size": 7, "seed": 3}}, "rollout": {"seed": 6}}
    config = load(env="textarena:Wordle-v0", **easier, eval_dataset={"kwargs": {"size": 9}})
    assert config.eval_dataset.kwargs == {"hard": 0, "size": 9, "seed": 1_000_000}
    assert config.seed == config.workflow_kwargs["seed"] == 6
    monkeypatch.setenv("RUN_SEED", "5")
    config = load(env="textarena:Wordle-v0", seed="${oc.env:RUN_SEED}")
    assert config.seed == config.workflow_kwargs["seed"] == 5
    config = load(env="textarena:Wordle-v0", train_dataset={"path": "rows.jsonl", "kwargs": {"hard": 0}})
    assert config.eval_dataset.kwargs == {"size": 100, "seed": 1_000_000}
    assert isinstance(load("env=textarena:Wordle-v0"), RunConfig)
    assert isinstance(load(env=OWN, root=ExperimentConfig), RunConfig)


def test_what_the_yaml_has_stays(load: Any) -> None:
    config = load(
        "train_dataset.kwargs.size=7",
        env=OWN,
        eval_dataset=None,
        workflow_kwargs={"max_turns": 3, "seed": 9},
    )
    assert config.workflow_kwargs == {"env": OWN, "seed": 9, "max_turns": 3}
    assert config.train_dataset.path == f"env:{OWN}" and config.train_dataset.kwargs == {"size": 7, "seed": 0}
    assert config.eval_dataset is None
    config = load(env="mcp:python -m tools", train_dataset={"path": "rows.jsonl"})
    assert config.train_dataset.path == "rows.jsonl" and config.eval_dataset is None
    config = load(env="textarena:Wordle-v0", workflow="my.Agent")
    assert (config.workflow, config.workflow_kwargs) == ("my.Agent", {})
    assert load(workflow="my.Agent", train_dataset={"path": "r.jsonl"}).env is None


def test_the_recorded_config_of_a_run_is_the_same_config(load: Any) -> None:
    config = load(env=OWN, eval_dataset=None)
    again = load(
        env=OWN,
        eval_dataset=None,
        workflow=config.workflow,
        workflow_kwargs=config.workflow_kwargs,
        train_dataset={"path": config.train_dataset.path, "kwargs": config.train_dataset.kwargs},
    )
    assert again == config


def test_a_wrong_prefix_is_an_error_of_the_key(load: Any) -> None:
    with pytest.raises(ConfigError, match=r"run.yaml: env is 'txtarena:Wordle-v0'; did you mean 'textarena'\?"):
        load(env="txtarena:Wordle-v0")
    with pytest.raises(ConfigError, match="train_dataset: required, but missing"):
        load(env="mcp:python -m tools")
    with pytest.raises(ConfigError, match="env is '3': write a dotted path"):
        load_rows(load(env=3).train_dataset)


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    monkeypatch.delitem(sys.modules, "areal_lite.environments.adapters.textarena", raising=False)
    with pytest.raises(
        ConfigError, match=r"textarena:X needs a package: .*textarena.*; pip install 'areal-lite.environments.'"
    ):
        load_rows(DatasetConfig(path="textarena:X"))


def test_rows_are_numbers_from_the_seed_on() -> None:
    rows = load_rows(DatasetConfig(path=f"env:{OWN}", kwargs={"size": 2, "seed": 40}))
    assert rows == [{"env": OWN, "number": 40}, {"env": OWN, "number": 41}]
    assert len(load_rows(DatasetConfig(path=f"env:{OWN}"))) == 500
    with pytest.raises(ConfigError, match="kwargs {'sise': 3} do not fit"):
        load_rows(DatasetConfig(path=f"env:{OWN}", kwargs={"sise": 3}))


def test_held_out_rows_of_an_environment_must_not_be_training_rows() -> None:
    train, held_out = (DatasetConfig(path=f"env:{OWN}", kwargs={"seed": seed, "size": 9}) for seed in (1, 5))
    with pytest.raises(ConfigError, match="overlap with the training rows' 1 to 9: set its seed to 10 or more"):
        check_held_out(train, held_out)


@pytest.mark.parametrize("adapter", catalog.ADAPTERS)
def test_each_prefix_has_its_class(adapter: str) -> None:
    module, _, name = catalog.ADAPTERS[adapter].place.partition(".")
    source = (Path(catalog.__file__).parent / f"adapters/{module}.py").read_text()
    assert f"class {name}:" in source and f"``{adapter}:" in source.splitlines()[0]
