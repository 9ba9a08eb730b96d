"""Intervals and verdicts against values of tables and values worked by hand."""

from __future__ import annotations
import math
import pytest
from areal_lite.tools.sweep.seed_statistics import Interval, compare_pairs, mean_interval, t_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [
        # Table of Student's t distribution (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
        (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 4, 2.776), (0.975, 9, 2.262),
        (0.975, 30, 2.042), (0.95, 4, 2.132), (0.95, 7, 1.895), (0.995, 5, 4.032), (0.999, 10, 4.144), (0.5, 3, 0.0),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_table(probability: float, freedom: int, quantile: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(quantile, abs=6e-4)


def test_an_interval_is_the_mean_and_t_standard_errors_on_each_side() -> None:
    # Mean 3, standard deviation sqrt(2.5), so a standard error of sqrt(0.5); t is 2.7764.
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3.0
    assert interval.high - 3.0 == pytest.approx(3.0 - interval.low) == pytest.approx(2.7764 * math.sqrt(0.5), abs=1e-4)
    assert mean_interval([1.0, 2.0, 3.0, 4.0, 5.0], level=0.9).high == pytest.approx(
        3 + 2.1318 * math.sqrt(0.5), abs=1e-4
    )


def test_one_seed_has_no_interval_and_decides_nothing() -> None:
    assert mean_interval([0.5]) == Interval(0.5, -math.inf, math.inf)
    assert compare_pairs([0.1], [0.9])[0] == "inconclusive"
    assert "no interval of one seed" in str(mean_interval([0.5]))


def test_pairs_decide_where_the_values_alone_would_not() -> None:
    first = [0.1, 0.5, 0.9]
    assert compare_pairs(first, [0.21, 0.60, 1.01])[0] == "better"
    assert compare_pairs(first, [0.21, 0.60, 1.01], lower_is_better=True)[0] == "worse"
    assert compare_pairs(first, [0.0, 0.41, 0.79])[0] == "worse"
    assert compare_pairs(first, [0.2, 0.4, 1.0])[0] == "inconclusive"


def test_a_higher_level_needs_more() -> None:
    # Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.0577; t is 4.303 at 95 % and 9.925 at 99 %.
    verdict, interval = compare_pairs([0.0, 0.0, 0.0], [0.1, 0.2, 0.3], level=0.95)
    assert (verdict, interval.low) == ("inconclusive", pytest.approx(0.2 - 4.3027 * 0.057735, abs=1e-4))
    assert compare_pairs([0.0] * 3, [0.1, 0.2, 0.3], level=0.9)[0] == "better"


def test_equal_runs_are_inconclusive() -> None:
    assert compare_pairs([0.3, 0.7], [0.3, 0.7]) == ("inconclusive", Interval(0.0, 0.0, 0.0))
