"""The lookahead: within its limits, more only where it shortens steps, less where groups lie waiting."""

from __future__ import annotations
import pytest
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.rollout.episodes.lookahead import IDLE, PATIENCE, WINDOW, Lookahead


def window(ahead: Lookahead, *, step_s: float = 1.0, starved: float = 0.0, oldest: float = 0.0, spare: int = 0) -> int:
    """Cut a window of equal batches; ``starved`` and ``oldest`` are shares of the step."""
    for _ in range(WINDOW):
        ahead.batch_cut(step_s=step_s, waited_s=step_s * (starved + oldest), starved_s=step_s * starved, spare=spare)
    return ahead.groups


@given(
    batch_size=st.integers(1, 9),
    max_staleness=st.integers(0, 9),
    batches=st.lists(
        st.tuples(st.floats(0.01, 10), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99)), max_size=200
    ),
)
def test_the_lookahead_stays_within_the_staleness_bound(
    batch_size: int, max_staleness: int, batches: list[tuple[float, float, float, int]]
) -> None:
    ahead = Lookahead(batch_size=batch_size, max_staleness=max_staleness)
    least = min(1, max_staleness)
    assert least * batch_size <= ahead.groups <= max_staleness * batch_size
    for step_s, waited, starved, spare in batches:
        ahead.batch_cut(step_s=step_s, waited_s=step_s * waited, starved_s=step_s * waited * starved, spare=spare)
        assert least <= ahead.groups <= max_staleness * batch_size


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    before=st.integers(0, 3),
    seen=st.integers(1, WINDOW - 1),
    batches=st.integers(1, 60),
    pace=st.tuples(st.floats(0.01, 10), st.floats(0, 1) | st.just(IDLE * 0.6), st.floats(0, 1), st.integers(0, 9)),
)
def test_a_forecast_is_what_happens_if_all_goes_on_as_before(
    sizes: tuple[int, int], before: int, seen: int, batches: int, pace: tuple[float, float, float, int]
) -> None:
    ahead = Lookahead(batch_size=sizes[0], max_staleness=sizes[1])
    step_s, waited, starved, spare = pace
    same = {"step_s": step_s, "waited_s": step_s * waited, "starved_s": step_s * waited * starved}

    def cut() -> int:
        ahead.batch_cut(**same, spare=spare)
        return ahead.groups

    for _ in range(before * WINDOW + seen):
        cut()
    forecast, now = ahead.forecast(batches), ahead.groups
    assert forecast == pytest.approx(sum([now, *(cut() for _ in range(batches - 1))]) / batches)


def test_it_begins_at_half_the_bound_and_at_least_one_batch() -> None:
    found = [Lookahead(batch_size=8, max_staleness=bound).groups for bound in (0, 1, 2, 3, 4, 5)]
    assert found == [0, 8, 8, 12, 16, 20]


def test_it_keeps_growing_while_the_trainer_starves_and_steps_get_shorter() -> None:
    ahead = Lookahead(batch_size=4, max_staleness=4)
    assert [window(ahead, step_s=step_s, starved=0.5) for step_s in (1.0, 0.94, 0.89)] == [13, 16, 10]
    # at the bound a smaller one is tried


def test_a_larger_lookahead_that_gains_just_enough_stays() -> None:
    ahead = Lookahead(batch_size=4, max_staleness=4)
    assert [window(ahead, step_s=step_s, starved=0.5) for step_s in (20.0, 19.0)] == [13, 16]


def test_a_larger_lookahead_that_gains_too_little_is_taken_back_and_not_tried_again_soon() -> None:
    ahead = Lookahead(batch_size=4, max_staleness=3)
    assert [window(ahead, step_s=step_s, starved=0.5) for step_s in (1.0, 0.96)] == [10, 6]
    assert [window(ahead, starved=0.5) for _ in range(PATIENCE[0])] == [6] * PATIENCE[0]
    assert window(ahead, starved=0.5) == 4  # next a smaller one


def test_after_each_failed_trial_the_pause_doubles_up_to_a_limit() -> None:
    ahead = Lookahead(batch_size=1, max_staleness=2)
    pauses, quiet = [], 0
    for _ in range(600):
        before = ahead.groups
        window(ahead, step_s=1.0 if before == 1 else 0.99, starved=0.5)
        if ahead.groups == before:
            quiet += 1
        elif ahead.groups == 1:  # the larger one gained too little
            pauses.append(quiet)
            quiet = 0
    assert pauses[1:7] == [4, 8, 16, 32, 64, 64]


def quiet(ahead: Lookahead) -> int:
    """Return how many windows of a starving trainer pass until the lookahead changes."""
    before, windows = ahead.groups, 0
    while window(ahead, starved=0.5) == before:
        windows += 1
    return windows


def test_a_trial_that_succeeds_makes_the_next_pause_short_again() -> None:
    ahead = Lookahead(batch_size=4, max_staleness=4)
    assert [window(ahead, step_s=step_s, starved=0.5) for step_s in (1.0, 0.96)] == [13, 8]
    assert quiet(ahead) == PATIENCE[0]
    assert window(ahead, starved=0.5) == 4  # the smaller one stays, and a still smaller one is tried
    assert window(ahead, step_s=1.06, starved=0.5) == 5
    assert quiet(ahead) == PATIENCE[0]


def test_a_smaller_lookahead_stays_unless_steps_get_longer() -> None:
    shorter, longer = (Lookahead(batch_size=4, max_staleness=3) for _ in range(2))
    for ahead in (shorter, longer):
        window(ahead, starved=0.5)
        for _ in range(PATIENCE[0] + 2):
            window(ahead, starved=0.5)
        assert ahead.groups == 4
    assert window(shorter, step_s=1.05, oldest=0.5) == 4
    assert window(longer, step_s=1.06, oldest=0.5) == 6


def test_it_does_not_grow_for_a_trainer_that_is_busy_or_waits_for_the_oldest_groups() -> None:
    ahead = Lookahead(batch_size=4, max_staleness=4)
    assert [
        window(ahead, starved=0.05),
        window(ahead, oldest=0.9),
        window(ahead, starved=0.05, oldest=0.1),
    ] == [8] * 3
    assert window(ahead, starved=0.06) == 13


def test_a_wait_of_exactly_the_idle_share_is_not_one() -> None:
    for waited, groups in ((IDLE, 6), (2 * IDLE, 8)):
        ahead = Lookahead(batch_size=4, max_staleness=4)
        for share in (*[0.0] * (WINDOW - 1), WINDOW):  # all of it before the last batch
            ahead.batch_cut(step_s=1.0, waited_s=share * waited, starved_s=share * IDLE, spare=2)
        assert ahead.groups == groups


def test_it_shrinks_by_the_fewest_spare_groups_unless_batches_wait_for_the_oldest() -> None:
    ahead = Lookahead(batch_size=4, max_staleness=4)
    assert window(ahead, spare=9, oldest=0.06) == 8
    for spare in [5] * (WINDOW - 2) + [1, 5]:
        ahead.batch_cut(step_s=1.0, waited_s=0.05, starved_s=0.0, spare=spare)
    assert ahead.groups == 7
    assert window(ahead, spare=2) == 5
    assert window(ahead, spare=9) == 4


def simulated(ahead: Lookahead, *, generation_s: float, train_s: float, saturated: bool, batches: int) -> list[float]:
    """Return step times with groups that take ``generation_s`` each, or together ``generation_s`` per batch."""
    steps = []
    for _ in range(batches):
        batches_ahead = ahead.groups / ahead.batch_size
        alone_s = train_s - min(
            train_s, batches_ahead * generation_s
        )  # a saturated server has nothing to do in this time
        step_s = max(train_s, generation_s + alone_s if saturated else (generation_s + train_s) / (1 + batches_ahead))
        spare = max(0, int(ahead.groups - ahead.batch_size * generation_s / train_s))
        starved_s = step_s - train_s
        ahead.batch_cut(step_s=step_s, waited_s=starved_s, starved_s=starved_s, spare=0 if starved_s else spare)
        steps.append(step_s)
    return steps


def test_slow_generation_gets_the_lookahead_that_feeds_the_trainer_and_a_saturated_server_does_not() -> None:
    latency, saturated = (Lookahead(batch_size=8, max_staleness=6) for _ in range(2))
    steps = simulated(latency, generation_s=5.5, train_s=1.0, saturated=False, batches=60 * WINDOW)
    assert steps[-1] <= 1.06 and latency.groups >= 40
    simulated(saturated, generation_s=2.0, train_s=1.0, saturated=True, batches=60 * WINDOW)
    assert saturated.groups <= 1.5 * 8 + 1


@pytest.mark.parametrize(("train_s", "groups"), [(1.0, 4), (0.1, 1), (1.9, 8), (1.75, 7)])
def test_a_saturated_server_gets_the_groups_that_keep_it_busy_while_the_trainer_is(train_s: float, groups: int) -> None:
    ahead = Lookahead(batch_size=8, max_staleness=2)
    steps = simulated(ahead, generation_s=2.0, train_s=train_s, saturated=True, batches=40 * WINDOW)
    assert ahead.groups == groups and set(steps) == {2.0}


def test_less_than_a_batch_that_makes_steps_longer_is_taken_back_until_a_larger_lookahead_failed_again() -> None:
    ahead = Lookahead(batch_size=8, max_staleness=2)
    assert [window(ahead, starved=0.5) for _ in range(2)] == [13, 8]
    assert window(ahead, starved=0.5) == 5
    assert window(ahead, step_s=1.06, starved=0.5) == 8
    assert [window(ahead, starved=0.5) for _ in range(2 * PATIENCE[0])] == [8] * 2 * PATIENCE[0]
    assert [window(ahead, starved=0.5) for _ in range(3)] == [13, 8, 5]


def test_a_busy_trainer_leaves_a_lookahead_of_less_than_a_batch_and_a_starving_one_raises_it() -> None:
    ahead = Lookahead(batch_size=8, max_staleness=2)
    assert [window(ahead, starved=0.5) for _ in range(3)][-1] == 5
    assert [window(ahead, spare=3) for _ in range(3)] == [5] * 3
    assert [window(ahead, starved=0.06) for _ in range(PATIENCE[0])] == [5] * (PATIENCE[0] - 1) + [8]


def test_training_as_the_bottleneck_leaves_one_batch_ahead() -> None:
    ahead = Lookahead(batch_size=8, max_staleness=8)
    steps = simulated(ahead, generation_s=0.5, train_s=1.0, saturated=False, batches=4 * WINDOW)
    assert ahead.groups == 8 and set(steps) == {1.0}
