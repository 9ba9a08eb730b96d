"""The arithmetic of a prediction: what the probe took, plus what it left out at its steady cost."""

from __future__ import annotations
from typing import Any
import pytest
from pydantic import TypeAdapter
from rich.console import Console
from areal_lite.config.run_config import RunConfig
from areal_lite.tools.plan.plan import plan_table, predict
from areal_lite.tools.plan.probe import Measurements


def config(**sections: Any) -> RunConfig:
    values = {
        "experiment_name": "exp",
        "model_path": "m",
        "workflow": "my.Agent",
        "train_dataset": {"path": "rows.jsonl"},
        "trainer": {"total_steps": 10, "learning_rate": 1e-5},
        **sections,
    }
    return TypeAdapter(RunConfig).validate_python(values)


def totals(*, sampled: float, trained: float, dumps: float, logs: float, **more: float) -> dict[str, float]:
    zeros = {"discarded": 0.0, "redrawn": 0.0, "groups": 0.0}
    return {"sampled": sampled, "trained": trained, "dumps": dumps, "logs": logs, **zeros, **more}


def probe(**changes: Any) -> Measurements:
    """Three steps of ten: the first takes 5 s, the others 2 s each; 3 s of start and 1 s of end come on top."""
    values = {
        "warm_up_steps": 1,
        "total_steps": 10,
        "wall_s": 13.0,
        "step_s": [5.0, 2.0, 2.0],
        "totals": [
            totals(sampled=100, trained=90, dumps=1000, logs=10),
            totals(sampled=220, trained=190, dumps=2200, logs=20),
            totals(sampled=340, trained=290, dumps=3400, logs=30),
        ],
        "staleness": [0.0, 0.0, 0.0],
        "lead_groups": [0.0, 0.0, 0.0],
        "tokens": 340.0,
        "memory": {"trainer": 5e8, "servers": 4e8},
        "disk": {"rollout": 3400, "metrics.jsonl": 30, "config.yaml": 7, "model": 50, "weights": 9},
        **changes,
    }
    return Measurements(**values)


def test_steps_left_cost_as_much_as_those_after_the_warm_up() -> None:
    plan = predict(config(), probe())
    assert plan.seconds["step"] == 2.0
    assert plan.seconds["total"] == 13 + 7 * 2
    assert plan.seconds["steps"] == 20.0
    assert plan.seconds["start and end"] == 7.0  # 3 s of start, 1 s of end, 3 s more of the first step
    assert plan.tokens == {"sampled": 340 + 7 * 120, "trained": 290 + 7 * 100}
    assert plan.disk_bytes["dumps"] == 3400 + 7 * 1200
    assert plan.disk_bytes["other"] == 30 + 7 * 10 + 7  # metrics.jsonl and config.yaml
    assert plan.disk_bytes["total"] == sum(size for name, size in plan.disk_bytes.items() if name != "total")


@pytest.mark.parametrize(
    ("every", "at_start", "count"), [(None, True, 2), (None, False, 1), (4, True, 4), (5, True, 3)]
)
def test_evaluations_are_counted_as_the_run_makes_them(every: int | None, at_start: bool, count: int) -> None:
    seconds = [3.0, 1.5] if at_start else [1.5]
    measured = probe(
        evaluation_s=seconds,
        evaluation_tokens=[40.0] * len(seconds),
        evaluated_at_start=at_start,
        tokens=340 + 40.0,  # one is after the last step
        disk={"eval-rollout": 60.0 * len(seconds)},
    )
    plan = predict(config(evaluation={"every_steps": every, "at_start": at_start}), measured)
    left = count - len(seconds)
    assert plan.seconds["total"] == 13 + 7 * 2 + left * 1.5
    assert plan.tokens["sampled"] == 380 + 7 * 120 + left * 40
    assert plan.disk_bytes["dumps"] == 7 * 1200 + count * 60


def test_an_evaluation_of_a_part_of_the_rows_is_scaled_up() -> None:
    measured = probe(evaluation_s=[2.0, 1.0], evaluation_tokens=[40.0, 40.0], evaluated_at_start=True, tokens=380.0)
    plan = predict(config(), measured, held_out_scale=3.0)
    assert plan.seconds["evaluation"] == 3.0
    assert plan.seconds["total"] == 13 + 7 * 2 + 2 * 3.0 - 2 * 1.0
    assert plan.tokens["sampled"] == 380 + 7 * 120 + 2 * 3 * 40 - 2 * 40


@pytest.mark.parametrize(
    ("checkpoint", "count", "each"),
    [
        ({}, 1, 0.5),
        ({"every_steps": 3}, 4, 0.5),  # 3, 6, 9 and the last; written in 1.5 s, within the steps between
        ({"every_steps": 1}, 10, 0.5),
        ({"every_minutes": 0.1, "keep": 3}, 4, 0.5),  # 20 s of steps: after 6, 12 and 18 s, and the last
    ],
)
def test_checkpoints_are_counted_and_written_beside_the_steps(
    checkpoint: dict[str, Any], count: int, each: float
) -> None:
    measured = probe(checkpoints=1, checkpoint_s=0.5, write_s=1.5, disk={"checkpoints": 100.0})
    plan = predict(config(checkpoint=checkpoint), measured)
    assert plan.seconds["total"] == pytest.approx(13 + 7 * 2 + (count - 1) * each)
    assert plan.disk_bytes["checkpoints"] == 100 * min(count, checkpoint.get("keep", 2))


def test_a_write_longer_than_the_steps_between_two_checkpoints_holds_training_back() -> None:
    measured = probe(checkpoints=1, checkpoint_s=0.5, write_s=3.0)
    assert predict(config(checkpoint={"every_steps": 1}), measured).seconds["checkpoint"] == 0.5 + 3.0 - 2.0


def test_a_whole_run_is_its_own_prediction() -> None:
    measured = probe(
        total_steps=3, evaluation_s=[2.0, 1.0], evaluation_tokens=[40.0, 40.0], evaluated_at_start=True, tokens=380.0
    )
    plan = predict(config(), measured)
    assert (plan.seconds["total"], plan.tokens) == (13.0, {"sampled": 380.0, "trained": 290.0})


def test_staleness_follows_the_lead_once_the_pipeline_has_filled() -> None:
    grows = [
        totals(sampled=100, trained=90, dumps=0, logs=0, groups=8.0),
        totals(sampled=200, trained=180, dumps=0, logs=0, groups=18.0, redrawn=2.0, discarded=5.0),
        totals(sampled=300, trained=270, dumps=0, logs=0, groups=28.0, redrawn=4.0, discarded=10.0),
    ]
    rollout = {"max_head_offpolicyness": 2}
    measured = probe(totals=grows, staleness=[0.0, 1.0, 1.5], lead_groups=[4.0, 8.0, 12.0], lead_after=6.0)
    plan = predict(config(rollout=rollout), measured)
    assert plan.staleness == {"mean": (2.5 + 7 * 6 / 8) / 10, "discarded tokens": 0.05, "redrawn groups": 0.2}
    assert any("lead" in text for text in plan.unknown)


def test_programs_on_nodes_are_counted() -> None:
    on_nodes = {"launch": "ray", "cluster": {"n_ranks": 2, "n_gpus_per_node": 4, "n_nodes": 1}}
    on_nodes |= {"server": {"backend": "sglang", "replicas": 2, "args": {"tp": 4}}, "rollout": {"workers": 3}}
    assert predict(config(**on_nodes), probe()).nodes == {"programs": 7, "CPUs": 7, "GPUs": 10, "nodes": 3}
    assert predict(config(), probe()).nodes == {}


def test_the_probe_ends_with_enough_steady_steps_and_seconds() -> None:
    measured = Measurements(warm_up_steps=1, min_steady_s=5.0, max_steps=8)
    ends = []
    for seconds in (60.0, 2.0, 2.0, 0.5, 0.6):
        measured.step_s.append(seconds)
        ends.append(measured.is_enough)
    assert ends == [False, False, False, False, True]
    measured.step_s = [0.01] * 8
    assert measured.is_enough
    assert not Measurements(step_s=[60.0] * 9).is_enough  # a whole run


def test_the_table_shows_totals_and_single_costs() -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(
            plan_table(predict(config(trainer={"total_steps": 10, "learning_rate": 1.0}), probe(total_steps=2000)))
        )
    shown = captured.get()
    assert "2000 steps, from 3 steps in 13 s" in shown
    assert "1 h 6 min  (2.0 s each)" in shown
    assert "500.0 MB" in shown
    assert "checkpoints  " not in shown.partition("disk: total")[2]  # there are none
