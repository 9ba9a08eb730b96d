from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.trainer.microbatches import num_inputs, plan_microbatches, plan_rows, shared_prefix
from tests.trainer.training_data import drawn_batch, sample


@given(lengths=st.lists(st.integers(1, 60), max_size=40), cap=st.integers(1, 200))
def test_a_plan_holds_each_row_once_and_stays_within_the_cap(lengths: list[int], cap: int) -> None:
    plan = plan_microbatches(lengths, max_tokens=cap)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= cap or len(batch) == 1


def test_rows_of_like_length_go_together_longest_first() -> None:
    assert plan_microbatches([3, 9, 4, 8], max_tokens=18) == [[1, 3], [2, 0]]


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=7), cap=st.sampled_from([60, 100, 180]))
def test_no_other_cut_of_the_sorted_lengths_costs_less(lengths: list[int], cap: int) -> None:
    def cost(plan: list[list[int]]) -> float:
        return sum(len(batch) * max(batch) + cap / 16 for batch in plan)

    ordered = sorted(lengths, reverse=True)
    cuts = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(ordered)), count) for count in range(len(ordered))
    )
    plans = [[ordered[i:j] for i, j in itertools.pairwise((0, *cut, len(ordered)))] for cut in cuts]
    allowed = [plan for plan in plans if all(len(batch) * max(batch) <= cap for batch in plan)]
    found = [[lengths[index] for index in batch] for batch in plan_microbatches(lengths, max_tokens=cap)]
    assert cost(found) == pytest.approx(min(map(cost, allowed)))


@given(seed=st.integers(0, 50), cap=st.integers(4, 120), balance=st.integers(1, 2000))
def test_rows_hold_each_sample_once_and_never_mix_groups(seed: int, cap: int, balance: int) -> None:
    batch = drawn_batch(seed)
    rows = plan_rows(batch, range(len(batch)), max_tokens=cap, balance_length=balance)
    assert sorted(index for row in rows for index in row.samples) == list(range(len(batch)))
    for row in rows:
        members = [batch[index] for index in row.samples]
        assert len({member.group_id for member in members}) == 1
        assert row.length == row.prefix + sum(num_inputs(member) - row.prefix for member in members)
        assert row.length <= cap or len(members) == 1


def test_a_group_computes_its_prompt_once() -> None:
    group = [sample([1, 2, 3, 4, 5, end, 9], [5, 6]) for end in (6, 7, 8)]
    (row,) = plan_rows(group, range(3), max_tokens=100, balance_length=1000)
    assert (row.prefix, row.length) == (5, 5 + 3)  # the last token of each predicts nothing


def test_siblings_part_where_attention_would_cost_more_than_the_prompt_saves() -> None:
    group = [sample([1, 2, *range(3, 60)], range(2, 59)) for _ in range(3)]
    assert len(plan_rows(group, range(3), max_tokens=1000, balance_length=10)) == 3


def test_models_that_cannot_share_get_a_row_per_sample() -> None:
    group = [sample([1, 2, 3], [2]) for _ in range(3)]
    rows = plan_rows(group, range(3), max_tokens=100, balance_length=1000, share=False)
    assert [row.samples for row in rows] == [(0,), (1,), (2,)]


def test_the_shared_prefix_ends_where_members_differ_or_one_is_trained() -> None:
    assert shared_prefix([sample([1, 2, 3, 4], [3]), sample([1, 2, 9, 4], [3])]) == 2
    assert shared_prefix([sample([1, 2, 3, 4], [3]), sample([1, 2, 3, 4], [2, 3])]) == 2
    assert shared_prefix([sample([1, 2, 3], [2]), sample([9, 2, 3], [2])]) == 0
