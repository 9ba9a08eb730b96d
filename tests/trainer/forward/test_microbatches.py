from __future__ import annotations
import itertools
import os
from types import SimpleNamespace
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.trainer.forward.microbatches import plan_blocks, plan_microbatches, read_ids
from areal_lite.trainer.rl.step_tokens import StepCut
from tests.trainer.training_data import VOCABULARY, drawn_batch, sequence


@given(lengths=st.lists(st.integers(1, 60), max_size=40), cap=st.integers(1, 200))
def test_a_plan_holds_each_item_once_and_stays_within_the_cap(lengths: list[int], cap: int) -> None:
    plan = plan_microbatches(lengths, max_tokens=cap)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= cap or len(batch) == 1


def test_a_micro_batch_holds_as_many_tokens_as_allowed_and_not_one_more() -> None:
    assert plan_microbatches([7, 7], max_tokens=14) == [[0, 1]]
    assert plan_microbatches([7, 7], max_tokens=13) == [[0], [1]]
    assert plan_microbatches([1, 1], max_tokens=14, num_blocks=[7, 7]) == [[0, 1]]
    assert plan_microbatches([1, 1], max_tokens=13, num_blocks=[7, 7]) == [[0], [1]]


def test_a_block_holds_as_many_tokens_as_allowed_and_not_one_more() -> None:
    group = [sequence([1, 2, 3, 4, answer, answer, 9], [5, 6]) for answer in (5, 6)]
    blocks = [plan_blocks(group, range(2), max_tokens=cap, balance_length=1000) for cap in (8, 7)]
    assert [[block.length for (block,) in bundles] for bundles in blocks] == [[8], [6, 6]]


@given(seed=st.integers(0, 50), cap=st.integers(4, 120), ragged=st.booleans(), whole=st.booleans())
def test_no_forward_pass_of_a_step_exceeds_the_cap(seed: int, cap: int, ragged: bool, whole: bool) -> None:
    batch = drawn_batch(seed)
    model: Any = SimpleNamespace(
        **{"balance_length": 500, "ragged": ragged, "shares_prefixes": True, "vocab_size": VOCABULARY},
        **{"tower": None, "pixels": None, "parts": 1},
    )
    pairs = [index // 2 for index in range(len(batch))]
    cut = StepCut(batch, model, ranks=Ranks(), device=torch.device("cpu"), units=pairs, whole=whole)
    bounds = np.cumsum([0, *(one.num_trained_tokens for one in batch)])
    seen = []
    for microbatch in cut(range(len(batch)), cap):
        sequences = set(np.searchsorted(bounds, microbatch.tokens.numpy(), "right") - 1)
        units = {index // 2 for index in sequences} if whole else sequences
        lengths = microbatch.packed.lengths
        assert (sum(lengths) if ragged else len(lengths) * max(lengths)) <= cap or len(units) == 1
        seen += microbatch.tokens.tolist()
    assert sorted(seen) == list(range(bounds[-1]))


def test_items_of_similar_length_share_a_micro_batch_longest_first() -> None:
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
def test_blocks_hold_each_sequence_once_and_never_mix_groups(seed: int, cap: int, balance: int) -> None:
    batch = drawn_batch(seed)
    bundles = plan_blocks(batch, range(len(batch)), max_tokens=cap, balance_length=balance)
    blocks = [block for (block,) in bundles]
    assert sorted(index for block in blocks for index in block.sequences) == list(range(len(batch)))
    for block in blocks:
        members = [batch[index] for index in block.sequences]
        assert len({member.group_id for member in members}) == 1
        assert block.length == len(
            {tuple(read_ids(one)[:end]) for one in members for end in range(1, len(read_ids(one)) + 1)}
        )
        assert block.length <= cap or len(members) == 1


@given(
    members=st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=2, max_size=8), st.integers(0, 3)), min_size=1, max_size=8
    ),
    cap=st.integers(4, 60),
    balance=st.integers(1, 300),
)
def test_each_sequence_shares_exactly_its_common_prefix_with_the_one_before_it(
    members: list[tuple[list[int], int]], cap: int, balance: int
) -> None:
    """Units whose sequences lie between each other's in the tree make blocks that leave sequences out."""
    group = [sequence([*ids, 9], [len(ids)]) for ids, _ in members]
    units = [unit for _, unit in members]
    bundles = plan_blocks(group, range(len(group)), max_tokens=cap, balance_length=balance, units=units)
    for block in itertools.chain.from_iterable(bundles):
        read = [read_ids(group[index]).tolist() for index in block.sequences]
        common = [len(os.path.commonprefix([one, other])) for one, other in itertools.pairwise(read)]
        assert block.shared == (0, *common)
        assert block.length == sum(map(len, read)) - sum(common)
        assert block.is_chain == all(shared == len(before) for shared, before in zip(common, read, strict=False))


def test_a_group_computes_its_prompt_once() -> None:
    group = [sequence([1, 2, 3, 4, 5, end, 9], [5, 6]) for end in (6, 7, 8)]
    ((block,),) = plan_blocks(group, range(3), max_tokens=100, balance_length=1000)
    assert (block.shared, block.length) == ((0, 5, 5), 5 + 3)  # the last token of each predicts nothing


def test_siblings_are_separated_where_attention_costs_more_than_the_prompt_saves() -> None:
    group = [sequence([1, 2, answer, *range(3, 59)], range(2, 59)) for answer in range(3)]
    assert len(plan_blocks(group, range(3), max_tokens=1000, balance_length=10)) == 3


def test_siblings_that_cost_the_same_together_and_apart_are_separated() -> None:
    """They read 5 and 8 tokens, of which 2 are the same."""
    group = [sequence([1, 2, *range(10, 14)], [5]), sequence([1, 2, *range(20, 27)], [8])]
    for balance_length, joined in ((16, False), (17, True)):
        assert (len(plan_blocks(group, range(2), max_tokens=100, balance_length=balance_length)) == 1) == joined


def test_a_unit_is_one_block_where_that_is_cheaper_and_else_one_bundle() -> None:
    group = [sequence([1, 2, 3, 4, 5, end, 9], [5, 6]) for end in (6, 7, 8, 9)]
    for share, blocks in ((True, [[(0, 1)], [(2, 3)]]), (False, [[(0,), (1,)], [(2,), (3,)]])):
        bundles = plan_blocks(group, range(4), max_tokens=7, balance_length=1000, share=share, units=[0, 0, 1, 1])
        assert sorted([block.sequences for block in bundle] for bundle in bundles) == blocks


def test_a_chain_continues_with_every_sequence() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    chain = [sequence(ids[:length], [length - 1]) for length in (4, 6, 8)]
    fork = [*chain[:2], sequence([*ids[:3], 9, 9, 9, 9], [6])]
    for group, is_chain in ((chain, True), (fork, False)):
        ((block,),) = plan_blocks(group, range(3), max_tokens=100, balance_length=1000)
        assert block.is_chain == is_chain


def test_models_that_cannot_share_get_a_block_per_sequence() -> None:
    group = [sequence([1, 2, 3], [2]) for _ in range(3)]
    bundles = plan_blocks(group, range(3), max_tokens=100, balance_length=1000, share=False)
    assert [block.sequences for (block,) in bundles] == [(0,), (1,), (2,)]
