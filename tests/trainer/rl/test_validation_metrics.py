"""Figures of a validation with several answers per prompt."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.trainer.rl.validation_metrics import validation_metrics
from tests.trainer.oracle_cases import case, facts


def test_every_metric_equals_the_oracles() -> None:
    """Oracle valmetric.process: the same resamples give the same digits."""
    rows = facts()["inputs"]["val"]
    ours = validation_metrics(rows["reward"], prompt_ids=rows["uids"], data_sources=rows["sources"])
    expected = case("valmetric.process", "metrics").items()
    assert ours == pytest.approx({name: value for name, value in expected if "/maj@" not in name}, rel=1e-9)


def test_estimates_are_near_the_exact_expectations() -> None:
    scores = [0.1, 0.9, 0.4, 0.4]
    ours = validation_metrics(scores, prompt_ids=["p"] * 4, data_sources=["s"] * 4)
    best = np.mean([max(scores[i] for i in draw) for draw in itertools.product(range(4), repeat=4)])
    assert ours["s/reward/best@4/mean"] == pytest.approx(best, abs=0.02)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6))
def test_more_answers_widen_the_range_from_worst_to_best(scores: list[float]) -> None:
    count = len(scores)
    ours = validation_metrics(scores, prompt_ids=["p"] * count, data_sources=["s"] * count)
    best, worst = ours[f"s/reward/best@{count}/mean"], ours[f"s/reward/worst@{count}/mean"]
    assert min(scores) - 1e-9 <= worst <= best <= max(scores) + 1e-9
    assert ours[f"s/reward/mean@{count}"] == pytest.approx(np.mean(scores), abs=1e-9)


@pytest.mark.parametrize(("count", "sizes"), [(2, [2]), (3, [2, 3]), (4, [2, 4]), (5, [2, 4, 5]), (9, [2, 4, 8, 9])])
def test_sizes_are_powers_of_two_below_n_and_n(count: int, sizes: list[int]) -> None:
    ours = validation_metrics([0.0] * count, prompt_ids=["p"] * count, data_sources=["s"] * count)
    assert [name for name in ours if "best" in name and "mean" in name] == [
        f"s/reward/best@{size}/mean" for size in sizes
    ]


def test_one_answer_per_prompt_has_only_a_mean_and_each_prompt_counts_once() -> None:
    ours = validation_metrics([1.0, 0.0, 0.5], prompt_ids=["p", "q", "p"], data_sources=["s", "s", "t"])
    assert ours == {"s/reward/mean@1": 0.5, "t/reward/mean@1": 0.5}
