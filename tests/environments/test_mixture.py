"""A list of environments as rows: what it becomes, what is refused, and the agent that plays it."""

from __future__ import annotations
import asyncio
import re
from dataclasses import asdict
from typing import Any
import pytest
from areal_lite.config.dataset_config import MIXTURE, ClassConfig, MixturePart
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.data.rows.load_rows import load_rows
from areal_lite.environments import catalog
from areal_lite.environments.environment_agent import EnvironmentAgent
from areal_lite.environments.mixture_sampler import WINDOW
from areal_lite.errors import ConfigError
from areal_lite.runs.entry_points import check_held_out

DICE, WORDLE = "tests.environments.games.Dice", "textarena:Wordle-v0"


def test_a_list_gives_the_rows_their_order_and_the_loop(load: Any) -> None:
    parts = [{"env": DICE, "weight": 2, "until": 0.9, "kwargs": {"size": 3}}, {"env": DICE, "name": "b", "kwargs": {}}]
    config = load(train_dataset=parts, seed=5, workflow_kwargs={"max_turns": 3})
    assert (config.workflow, config.workflow_kwargs) == (catalog.AGENT, {"env": [DICE], "seed": 5, "max_turns": 3})
    train, held_out = config.train_dataset, config.eval_dataset
    assert train.path == held_out.path == MIXTURE
    assert train.sampler == ClassConfig(path="areal_lite.environments.mixture_sampler", name="MixtureSampler")
    assert train.kwargs == {
        "seed": 5,
        "parts": [
            {"env": DICE, "name": DICE, "weight": 2.0, "until": 0.9, "kwargs": {"size": 3, "seed": 0}},
            {"env": DICE, "name": "b", "weight": 1.0, "until": None, "kwargs": {"size": 1000, "seed": 0}},
        ],
    }
    assert held_out.sampler is None
    numbers = {"size": 100, "seed": 1_000_000}
    assert held_out.kwargs["parts"] == [asdict(MixturePart(env=DICE, name=n, kwargs=numbers)) for n in (DICE, "b")]
    assert load(train_dataset=parts, eval_dataset=None).eval_dataset is None
    config = load(train_dataset=parts, rollout={"seed": 6})
    assert config.seed == config.train_dataset.kwargs["seed"] == config.workflow_kwargs["seed"] == 6
    assert isinstance(load(train_dataset=parts, root=ExperimentConfig), RunConfig)
    rows = load_rows(train)
    assert rows[2:4] == [
        {"env": DICE, "number": 2, "data_source": DICE},
        {"env": DICE, "number": 0, "data_source": "b"},
    ]


def test_the_recorded_config_of_a_mixture_is_the_same_config(load: Any) -> None:
    config = load(train_dataset=[{"env": DICE}], eval_dataset=[{"env": WORDLE}])
    assert config.workflow_kwargs["env"] == [DICE, WORDLE]
    recorded = {name: asdict(getattr(config, name)) for name in ("train_dataset", "eval_dataset")}
    assert load(workflow=config.workflow, workflow_kwargs=config.workflow_kwargs, **recorded) == config


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"train_dataset": [{"env": DICE, "weight": 0}]}, "train_dataset.0.weight: 0: it must be greater than 0"),
        ({"train_dataset": [{"weight": 1}]}, "train_dataset.0.env: required, but missing"),
        ({"train_dataset": [{"env": DICE, "workflow": "w"}]}, "train_dataset.0.workflow: 'w': Unexpected keyword"),
        (
            {"train_dataset": [{"env": DICE}, {"env": "txtarena:W"}]},
            "train_dataset.1.env is 'txtarena:W'; did you mean",
        ),
        ({"train_dataset": [{"env": "mcp:a b"}]}, "train_dataset.0.env is 'mcp:a b', which has no rows of its own"),
        (
            {"train_dataset": [{"env": DICE}, {"env": DICE}]},
            f"train_dataset has two parts of one name ({DICE}, {DICE})",
        ),
        (
            {"train_dataset": [{"env": DICE}], "workflow": "my.Agent"},
            "workflow is 'my.Agent', but a list of environments",
        ),
        ({"train_dataset": [{"env": DICE}], "env": DICE}, f"env is '{DICE}', but a list of environments"),
        ({"env": DICE, "eval_dataset": [{"env": DICE}]}, "only one of train_dataset and eval_dataset is a list"),
        ({"train_dataset": [{"env": DICE}], "eval_dataset": {"path": "r.jsonl"}}, "only one of train_dataset and eval"),
        (
            {"train_dataset": [{"env": DICE}], "eval_dataset": [{"env": DICE, "until": 0.9}]},
            "eval_dataset.0.until is 0.9, but held-out rows all run: remove it",
        ),
        (
            {"train_dataset": [{"env": DICE}], "eval_dataset": [{"env": DICE, "weight": 2}]},
            "eval_dataset.0.weight is 2, but held-out rows all run",
        ),
    ],
)
def test_a_wrong_part_is_an_error_at_its_place(load: Any, values: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"run.yaml: {error}")):
        load(**values)


def test_held_out_rows_of_a_part_must_not_be_its_training_rows(load: Any) -> None:
    part = {"env": DICE, "name": "a", "kwargs": {"size": 10}}
    config = load(train_dataset=[{"env": DICE}, part], eval_dataset=[part | {"kwargs": {"seed": 10}}])
    check_held_out(config.train_dataset, config.eval_dataset)
    config = load(train_dataset=[part], eval_dataset=[part | {"kwargs": {"seed": 9}}])
    with pytest.raises(ConfigError, match=f"env:{DICE} uses seeds 9 to 108, .* set its seed to 10 or more"):
        check_held_out(config.train_dataset, config.eval_dataset)


def test_the_documented_number_of_groups_is_the_samplers() -> None:
    field: Any = MixturePart.__dict__["__pydantic_fields__"]["until"]
    assert f"its last {WINDOW} trained groups" in " ".join(field.description.split())


class Named:
    """An environment that ends when it begins: it raises its argument."""

    def __init__(self, name: str = "plain") -> None:
        self.name = name

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        raise LookupError(self.name)

    async def step(self, action: Any) -> Any:
        pass

    async def close(self) -> None:
        pass


class Other(Named):
    pass


@pytest.mark.parametrize(("env", "found"), [("Named", "plain"), ("Other", "given")])
def test_the_agent_plays_the_environment_of_the_row(env: str, found: str) -> None:
    names = [f"{__name__}.{name}" for name in ("Named", "Other")]
    agent = EnvironmentAgent(names, kwargs={names[1]: {"name": "given"}})
    with pytest.raises(LookupError, match=found):
        asyncio.run(agent.run({"env": f"{__name__}.{env}"}))
    with pytest.raises(ConfigError, match="workflow_kwargs.kwargs has size: of several environments"):
        EnvironmentAgent(names, kwargs={"size": 1})
