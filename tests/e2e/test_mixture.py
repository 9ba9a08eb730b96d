"""A run on two environments, of which one ends, stopped before that and resumed, draws the rows of one that was not."""

from __future__ import annotations
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any
import pytest
import yaml
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_training
from areal_lite.tools.inspect.dumps import Dumps

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="it is an extra")
STEPS, BATCH = 3, 24
A, B = "reasoning-gym:chain_sum", "reasoning-gym:lcm"


class Crash(Exception):
    """Stops a run from within."""


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def rows(run_dir: Path, version: int) -> list[str]:
    """Return the questions of the groups that began under a policy version, in the order in which they were drawn."""
    paths = sorted((run_dir / f"rollout/{version}").glob("*.jsonl"), key=lambda path: int(path.stem))
    return [json.loads(path.read_bytes().splitlines()[0])["row"]["question"] for path in paths]


def data_state(run_dir: Path) -> Any:
    path = f"checkpoints/step_{STEPS:08d}/rollout/global_dataset_state_dict_{STEPS}.json"
    return json.loads((run_dir / path).read_bytes())


def test_a_mixture_resumes_with_the_rows_of_an_uninterrupted_run(served_yaml: Path) -> None:
    values = yaml.safe_load(served_yaml.read_text())
    del values["workflow"]
    values["train_dataset"] = [
        {"env": A, "weight": 2, "until": 0.0, "kwargs": {"size": 20}},  # ends after 2 steps of 16 groups
        {"env": B, "kwargs": {"size": 20}},
    ]
    values["eval_dataset"] = [{"env": env, "kwargs": {"size": 2}} for env in (A, B)]
    values["rollout"] |= {"group_size": 2, "consumer_batch_size": BATCH}
    values["rollout"]["gconfig"]["max_new_tokens"] = values["rollout"]["eval_gconfig"]["max_new_tokens"] = 4
    values["trainer"]["total_steps"] = STEPS
    values |= {"save_model": False, "checkpoint": {"every_steps": 1}, "evaluation": {"at_start": False}}
    served_yaml.write_text(yaml.safe_dump(values))

    def crash_at_2(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise Crash

    whole = run_training(load_config(served_yaml, ["trial_name=whole"])).run_dir
    broken = load_config(served_yaml, ["trial_name=broken"])
    with pytest.raises(Crash):
        run_training(broken, on_step=crash_at_2)
    resumed = run_training(broken).run_dir
    assert data_state(resumed) == data_state(whole)
    with Dumps.open(whole) as dumps:
        counts = [[dumps.count(f"scope=rollout version={v} source={env}") for env in (A, B)] for v in range(STEPS)]
        assert counts == [[32, 16]] * 2 + [[0, 48]]
        assert dumps.count(f"scope=eval-rollout source={B}") == 2
    for version in range(STEPS):  # step 2 ran twice, and the crash stopped what had begun for step 3
        assert rows(resumed, version)[-BATCH:] == rows(whole, version)
    for run_dir in (whole, resumed):
        *steps, last = records(run_dir)
        trained = [{name for name in record if name.startswith("rollout/env/")} for record in steps]
        of_a, of_b = (f"rollout/env/{env}/reward" for env in (A, B))
        assert trained == [{of_a, of_b}] * 2 + [{of_b}]
        mean = (2 * steps[0][of_a] + steps[0][of_b]) / 3
        assert mean == pytest.approx(steps[0]["train/reward_mean"], abs=1e-6)
        assert {f"eval/{env}/reward/mean@1" for env in (A, B)} <= last.keys()
