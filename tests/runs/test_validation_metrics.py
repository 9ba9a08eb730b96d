"""Figures of a validation with several answers per prompt."""

from __future__ import annotations
import itertools
from types import SimpleNamespace
from typing import Any
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.runs.evaluation import _by_data_source, validation_metrics
from tests.trainer.oracle_cases import case, facts


def test_every_metric_equals_the_oracles() -> None:
    """Oracle valmetric.process: the same resamples give the same digits."""
    rows = facts()["inputs"]["val"]
    ours = validation_metrics(
        {"reward": rows["reward"]},
        prompt_ids=rows["uids"],
        data_sources=rows["sources"],
        predictions=rows["pred"],
    )
    assert ours == pytest.approx(case("valmetric.process", "metrics"), rel=1e-9)


def test_estimates_are_near_the_exact_expectations() -> None:
    scores, predictions = [0.1, 0.9, 0.4, 0.4], ["a", "b", "a", "c"]
    ours = validation_metrics({"reward": scores}, prompt_ids=["p"] * 4, data_sources=["s"] * 4, predictions=predictions)
    draws = list(itertools.product(range(4), repeat=4))
    best = np.mean([max(scores[i] for i in draw) for draw in draws])
    votes = [[predictions[i] for i in draw] for draw in draws]
    majority = np.mean([scores[d[v.index(max(v, key=v.count))]] for d, v in zip(draws, votes, strict=True)])
    assert ours["s/reward/best@4/mean"] == pytest.approx(best, abs=0.02)
    assert ours["s/reward/maj@4/mean"] == pytest.approx(majority, abs=0.03)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6))
def test_more_answers_widen_the_range_from_worst_to_best(scores: list[float]) -> None:
    count = len(scores)
    ours = validation_metrics({"r": scores}, prompt_ids=["p"] * count, data_sources=["s"] * count)
    best, worst = ours[f"s/r/best@{count}/mean"], ours[f"s/r/worst@{count}/mean"]
    assert min(scores) - 1e-9 <= worst <= best <= max(scores) + 1e-9
    assert ours[f"s/r/mean@{count}"] == pytest.approx(np.mean(scores), abs=1e-9)


@pytest.mark.parametrize(("count", "sizes"), [(2, [2]), (3, [2, 3]), (4, [2, 4]), (5, [2, 4, 5]), (9, [2, 4, 8, 9])])
def test_sizes_are_powers_of_two_below_n_and_n(count: int, sizes: list[int]) -> None:
    ours = validation_metrics({"r": [0.0] * count}, prompt_ids=["p"] * count, data_sources=["s"] * count)
    assert [name for name in ours if "best" in name and "mean" in name] == [f"s/r/best@{size}/mean" for size in sizes]


def test_one_answer_per_prompt_has_only_a_mean_and_each_prompt_counts_once() -> None:
    ours = validation_metrics(
        {"r": [1.0, 0.0, 0.5]},
        prompt_ids=["p", "q", "p"],
        data_sources=["s", "s", "t"],
        predictions=["x"] * 3,
    )
    assert ours == {"s/r/mean@1": 0.5, "t/r/mean@1": 0.5}


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="acc has 1 entries for 2 answers"):
        validation_metrics({"acc": [1.0]}, prompt_ids=["p", "q"], data_sources=["s", "s"])


@pytest.mark.parametrize("last", ["b", None])
def test_a_run_votes_if_every_reward_came_with_a_prediction(last: str | None) -> None:
    def episode(reward: float | None, pred: str | None) -> Any:
        return SimpleNamespace(sequences=[1], reward=reward, reward_extra={"pred": pred, "acc": 1.0})

    episodes = [episode(0.1, "a"), episode(0.9, "b"), episode(0.3, last), episode(None, None)]
    group: Any = SimpleNamespace(data={"data_source": "s"}, trajectories=episodes)
    ours = _by_data_source([group], 4)
    assert ours["eval/s/reward/mean@3"] == pytest.approx(1.3 / 3)
    expected = validation_metrics(
        {"reward": [0.1, 0.9, 0.3]}, prompt_ids=["0"] * 3, data_sources=["s"] * 3, predictions=["a", "b", "b"]
    )
    votes = {f"eval/{name}": value for name, value in expected.items() if "/maj@" in name}
    assert {name: value for name, value in ours.items() if "/maj@" in name} == (votes if last else {})
