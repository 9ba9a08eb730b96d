"""docs/training.md: its tables are complete, and what it shows can be done."""

import re
import sys
import types
from dataclasses import fields
from pathlib import Path

import yaml

from areal_lite.api.config_loader import load_config
from areal_lite.api.trainer_config import CorrectionConfig, TrainerConfig
from areal_lite.trainer.algorithm import Algorithm
from areal_lite.trainer.estimators.estimator import ESTIMATORS
from areal_lite.trainer.objectives.policy_loss import POLICY_LOSSES

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/training.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def named_in_table(heading):
    rows = PAGE.split(f"\n| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_estimator_and_loss_is_in_its_table():
    assert named_in_table("advantage") == set(ESTIMATORS.names())
    assert named_in_table("loss") == set(POLICY_LOSSES.names())


def test_every_key_that_chooses_an_algorithm_is_explained():
    told = set(re.findall(r"[`{ (](\w+)[`:,} ]", PAGE))
    of_learning = {"total_steps", "learning_rate", "device", "num_threads"}
    general = {"lr_schedule", "warmup_steps", "weight_decay", "adam_betas", "adam_eps", "max_grad_norm"}
    keys = {field.name for record in (TrainerConfig, CorrectionConfig) for field in fields(record)}
    assert not keys - told - general - of_learning


def test_a_loss_of_ones_own_is_taken(tmp_path, monkeypatch):
    (code,) = blocks("python")
    module = types.ModuleType("my_losses")
    exec(compile(code, "docs/training.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_losses", module)
    (shown,) = map(yaml.safe_load, blocks("yaml"))
    own = yaml.safe_load((REPOSITORY / "configs/on_policy.yaml").read_text())
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(own | shown))
    assert Algorithm(load_config(path).trainer, max_new_tokens=16).needs_every_sample


def test_the_page_is_short():
    assert len(PAGE.splitlines()) < 200
