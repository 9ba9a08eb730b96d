"""docs/training.md: its tables are complete and its examples work."""

import re
import sys
import types
from dataclasses import fields
from pathlib import Path
import yaml
from areal_lite.config.loader import load_config
from areal_lite.config.trainer_config import CorrectionConfig, TrainerConfig
from areal_lite.trainer.estimators import ESTIMATORS, EstimatorInputs
from areal_lite.trainer.objectives.policy_loss import POLICY_LOSSES
from areal_lite.trainer.rl.algorithm import Algorithm

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/training.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def named_in_table(heading):
    rows = PAGE.split(f"\n| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_estimator_and_loss_is_in_its_table():
    assert named_in_table("advantage") == set(ESTIMATORS)
    assert named_in_table("loss") == set(POLICY_LOSSES)


def test_every_key_that_chooses_an_algorithm_is_explained():
    mentioned = set(re.findall(r"[`{ (](\w+)[`:,} ]", PAGE))
    basics = {"total_steps", "learning_rate", "device", "num_threads"}
    general = {"lr_schedule", "warmup_steps", "weight_decay", "adam_betas", "adam_eps", "max_grad_norm"}
    elsewhere = {"sp_size", "tp_size", "vision"}
    keys = {field.name for record in (TrainerConfig, CorrectionConfig) for field in fields(record)}
    assert not keys - mentioned - general - basics - elsewhere


def test_the_custom_loss_and_estimator_work(tmp_path, monkeypatch):
    module = types.ModuleType("mine")
    for code in blocks("python"):
        exec(compile(code, "docs/training.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "mine", module)
    (shown,) = map(yaml.safe_load, blocks("yaml"))
    own = yaml.safe_load((REPOSITORY / "configs/on_policy.yaml").read_text())
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(own | shown))
    config = load_config(path).trainer
    assert (config.loss, config.advantage) == ("mine.squared_ratio", "mine.over_the_median")
    assert Algorithm(config, max_new_tokens=16).needs_every_episode


def test_every_input_that_an_estimator_can_request_is_in_the_table():
    optional = {field.name for field in fields(EstimatorInputs) if field.default is None}
    assert named_in_table("NAME") == optional


def test_the_page_is_short():
    assert len(PAGE.splitlines()) < 200
