"""No mini-batch above the cap, equally many per rank, and the order can be restored."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.data.batch.packing_plan import balance_order, plan_packing
from areal_lite.errors import ConfigError


@st.composite
def plans(draw, pair=None):
    """A plan with the arguments it was made from."""
    multiple_of = draw(st.sampled_from([1, 2, 8]))
    pair = draw(st.booleans()) if pair is None else pair
    lengths = draw(st.lists(st.integers(1, 100), min_size=1, max_size=30))
    lengths = lengths * 2 if pair else lengths
    max_tokens = draw(st.integers(104, 150)) * (2 if pair else 1)
    num_ranks = draw(st.integers(1, 5))
    given_lengths = list(lengths)
    plan = plan_packing(lengths, max_tokens=max_tokens, num_ranks=num_ranks, multiple_of=multiple_of, pair=pair)
    assert lengths == given_lengths  # R-B11: nothing of the caller's is changed
    return plan, lengths, max_tokens, num_ranks, multiple_of, pair


def batches_of(plan):
    return [batch for rank in plan.ranks for batch in rank]


@given(plans())
def test_each_sequence_and_dummy_is_in_one_mini_batch(made):  # R10
    plan, lengths, *_ = made
    indices = [index for batch in batches_of(plan) for index in batch]
    assert sorted(indices) == list(range(len(lengths) + plan.num_dummies))
    assert plan.num_sequences == len(lengths)


@given(plans())
def test_every_rank_has_equally_many_mini_batches_and_none_is_empty(made):  # R17
    plan, _, _, num_ranks, *_ = made
    assert len(plan.ranks) == num_ranks
    assert len({len(rank) for rank in plan.ranks}) == 1
    assert all(batches_of(plan))


@given(plans())
def test_no_mini_batch_exceeds_the_cap(made):  # R14, V-B14
    plan, _, max_tokens, *_ = made
    assert all(sum(plan.lengths[index] for index in batch) <= max_tokens for batch in batches_of(plan))


@given(plans())
def test_lengths_are_rounded_up_to_the_multiple(made):  # R11
    plan, lengths, _, _, multiple_of, _ = made
    assert plan.lengths[: len(lengths)] == tuple(math.ceil(n / multiple_of) * multiple_of for n in lengths)


@given(plans())
def test_there_are_at_least_as_many_mini_batches_as_the_tokens_need(made):  # R13
    plan, lengths, max_tokens, num_ranks, *_ = made
    tokens = sum(plan.lengths[: len(lengths)])
    assert len(batches_of(plan)) >= math.ceil(math.ceil(tokens / max_tokens) / num_ranks) * num_ranks


@given(plans())
def test_dummies_are_the_shortest_sequences_and_weigh_nothing(made):  # R14, R-B13
    plan, lengths, _, _, multiple_of, pair = made
    assert plan.lengths[len(lengths) :] == (multiple_of,) * plan.num_dummies
    assert plan.weights == (1.0,) * len(lengths) + (0.0,) * plan.num_dummies
    assert plan.num_dummies % (2 if pair else 1) == 0


@given(plans())
def test_dummies_are_added_only_if_there_are_too_few_sequences(made):  # R14
    plan, lengths, *_, pair = made
    assert plan.num_dummies == max(0, len(batches_of(plan)) * (2 if pair else 1) - len(lengths))


@given(plans())
def test_the_order_is_restored_and_dummies_are_dropped(made):  # R16
    plan, lengths, *_ = made
    outputs = [[[f"output {index}" for index in batch] for batch in rank] for rank in plan.ranks]
    assert plan.restore(outputs) == [f"output {index}" for index in range(len(lengths))]


@given(plans(pair=True))
def test_pairs_stay_side_by_side_in_one_mini_batch(made):  # R15
    plan, *_ = made
    for batch in batches_of(plan):
        assert all(index % 2 == 0 for index in batch[::2])
        assert batch[1::2] == tuple(index + 1 for index in batch[::2])


@given(plans())
def test_the_ranks_ith_mini_batches_have_similar_sizes(made):
    plan, *_, num_ranks, _, _ = made
    sizes = [[sum(plan.lengths[index] for index in batch) for batch in rank] for rank in plan.ranks]
    in_step = [sizes[rank][place] for place in range(len(sizes[0])) for rank in range(num_ranks)]
    assert in_step == sorted(in_step, reverse=True)


def test_one_pair_on_two_ranks_gets_a_pair_of_dummies():  # R-B10
    plan = plan_packing([5, 3], max_tokens=16, num_ranks=2, multiple_of=4, pair=True)
    assert plan.ranks == (((0, 1),), ((2, 3),))
    assert plan.lengths == (8, 4, 4, 4)
    assert plan.restore([[["a", "b"]], [["pad", "pad"]]]) == ["a", "b"]


def test_the_cap_holds_where_balance_alone_would_break_it():  # V-B14
    plan = plan_packing([75, 99, 88, 97, 84], max_tokens=126)
    assert len(plan.ranks[0]) == 5  # the total would fit four


def test_the_search_for_the_number_of_mini_batches_is_short():
    start = time.thread_time()
    plan = plan_packing([4500] * 2000, max_tokens=8192)
    assert time.thread_time() - start < 2  # some milliseconds; from the total on it would be a thousand tries
    assert len(plan.ranks[0]) == 2000


def test_a_plan_by_hand():
    plan = plan_packing([6, 3, 2, 4, 1], max_tokens=8, num_ranks=2)
    assert plan.ranks == (((0, 2),), ((1, 3, 4),))
    assert plan.inverse_index == (0, 2, 1, 3, 4)


def test_plans_do_not_share_state():  # R-B11
    first = plan_packing([5, 3, 9], max_tokens=9)
    plan_packing([1] * 8, max_tokens=2, num_ranks=3)
    assert first.restore([[[index for index in batch] for batch in first.ranks[0]]]) == [0, 1, 2]
    assert first == plan_packing([5, 3, 9], max_tokens=9)


def test_the_cap_is_an_argument():  # R-B12
    assert len(plan_packing([4] * 8, max_tokens=8).ranks[0]) == 4
    assert len(plan_packing([4] * 8, max_tokens=32).ranks[0]) == 1


def test_a_sequence_above_the_cap_is_refused_with_both_numbers():  # R12
    with pytest.raises(ConfigError, match="sequence 1 has 132 tokens.*multiples of 4.*at most 130.*raise"):
        plan_packing([5, 130], max_tokens=130, multiple_of=4)
    with pytest.raises(ConfigError, match="sequences 2 and 3 have 90 tokens.*at most 64"):
        plan_packing([5, 5, 50, 40], max_tokens=64, pair=True)


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        ([], {}, "no sequences"),
        ([3, 0], {}, "sequence 1 has 0 tokens.*drop"),
        ([3, 4, 5], {"pair": True}, "3 sequences are not pairs"),
        ([3], {"num_ranks": 0}, "num_ranks is 0"),
        ([3], {"multiple_of": 0}, "multiple_of is 0"),
        ([3], {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_lengths_that_cannot_be_planned_are_refused(lengths, arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_packing(lengths, **{"max_tokens": 8, **arguments})


def test_outputs_of_the_wrong_shape_are_refused():
    plan = plan_packing([5, 3, 9], max_tokens=9)
    with pytest.raises(ValueError, match=r"are \[\[1, 1\]\], the plan has \[\[1, 2\]\]"):
        plan.restore([[["a"], ["b"]]])


@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_equal_slices_hold_nearly_equal_tokens(num_ranks, per_rank, data):  # V43
    count = num_ranks * per_rank
    lengths = data.draw(st.lists(st.integers(0, 500), min_size=count, max_size=count))
    order = balance_order(lengths, num_ranks)
    assert sorted(order) == list(range(count))
    loads = [sum(lengths[i] for i in order[start : start + per_rank]) for start in range(0, count, per_rank)]
    assert max(loads) - sum(loads) / num_ranks <= max(lengths)


def test_a_balanced_order_by_hand():  # V43
    assert balance_order([9, 8, 2, 1], 2) == [0, 3, 1, 2]
    with pytest.raises(ValueError, match="3 sequences cannot be divided evenly among 2 ranks"):
        balance_order([1, 2, 3], 2)
