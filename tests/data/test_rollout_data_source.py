"""Every epoch gives each row once, in an order made from (seed, epoch); the place can be saved."""

import itertools
import json
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.data.rollout_data_source import RolloutDataSource
from areal_lite.errors import ConfigError


def make(size=5, seed=1, shuffle=True):
    return RolloutDataSource([{"n": n} for n in range(size)], seed=seed, shuffle=shuffle)


def take(source, count):
    return [row["n"] for row in itertools.islice(source, count)]


@given(size=st.integers(1, 7), seed=st.integers(), shuffle=st.booleans())
def test_every_epoch_gives_each_row_once(size, seed, shuffle):
    source = make(size, seed, shuffle)
    assert all(sorted(take(source, size)) == list(range(size)) for _ in range(4))


def test_the_order_depends_on_seed_and_epoch_alone():
    first = take(make(50), 100)
    random.seed(7)
    assert take(make(50), 100) == first
    assert first[:50] != first[50:]
    assert take(make(50, seed=2), 50) != first[:50]
    assert take(make(50, shuffle=False), 100) == [*range(50)] * 2


@given(size=st.integers(1, 5), before=st.integers(0, 12), shuffle=st.booleans())
def test_a_saved_place_goes_on_where_it_was(size, before, shuffle):
    source = make(size, shuffle=shuffle)
    take(source, before)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = make(size, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert take(resumed, 12) == take(source, 12)


@pytest.mark.parametrize("other", [make(6), make(seed=2), make(shuffle=False)])
def test_a_place_in_other_data_is_refused(other):
    with pytest.raises(ConfigError, match="made with other data.*start another trial"):
        other.load_state_dict(make().state_dict())


def test_a_row_may_be_changed_by_who_got_it():
    source = make(1)
    next(source)["n"] = 9
    assert next(source) == {"n": 0}


def test_rows_that_json_cannot_hold_have_a_place_too():
    rows = [{"image": object(), "n": 10**30, (1, 2): 3}]
    states = [RolloutDataSource(rows, seed=1, shuffle=True).state_dict() for _ in range(2)]
    assert states[0] == states[1]


def test_no_rows_are_refused():
    with pytest.raises(ConfigError, match="no rows"):
        make(0)


def test_threads_share_an_epoch_without_loss_or_repeat():
    source, given_out = make(2000), []

    def draw():
        given_out.extend(take(source, 500))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given_out) == list(range(2000))
