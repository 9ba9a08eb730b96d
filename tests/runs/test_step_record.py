"""What a training step records of the time and the tokens since the record before."""

from __future__ import annotations
from types import SimpleNamespace
from typing import Any
import pytest
from areal_lite.runs import rl_run


def test_tokens_per_second_are_those_of_the_time_since_the_record_before(monkeypatch: pytest.MonkeyPatch) -> None:
    run, tokens, seen = object.__new__(rl_run.RLRun), [0.0], list[float]()
    engine = SimpleNamespace(failures=SimpleNamespace(top_cause=str))
    metrics = {"metrics": lambda: {"rollout/generated_tokens": tokens[0]}, "scalars": dict, "engine": engine}
    values: dict[str, Any] = {"driver": SimpleNamespace(**metrics), "devices": 1, "total_steps": 2, "started": 100.0}
    values |= {"record_step": lambda record, began: seen.append(record["perf/generated_tokens_per_second"])}
    for name, value in values.items():
        setattr(run, name, value)
    # From 100 to 150 an evaluation before the first step, then two steps of 50 seconds.
    for began, now, generated in ((150.0, 200.0, 2000.0), (200.0, 250.0, 2500.0)):
        tokens[0] = generated
        monkeypatch.setattr(rl_run.time, "monotonic", lambda now=now: now)
        run.log({"tokens": 1.0}, began, now, now)
    assert seen == [20.0, 10.0]
